// Says what went wrong.

import { plural } from "/pages/format.js";

export function explained(error) {
  if (error.status === 0) return "The service cannot be reached. Check your connection and try again.";
  if (error.status === 401) return "This is not the operator token. Check that all of it was copied.";
  if (error.code === "LOGINS_LIMITED") {
    return `Too many log-ins failed from your address. Try again in ${plural(error.retryAfter ?? 60, "second")}.`;
  }
  return error.message || "The service could not answer. Try again.";
}
