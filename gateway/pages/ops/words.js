// Explains errors.

import { plural } from "/pages/format.js";

export function explain(error) {
  if (error.status === 0) return "The service cannot be reached. Check your connection and try again.";
  if (error.status === 401) return "This token is not valid. Check that you copied all of it.";
  if (error.code === "LOGINS_LIMITED") {
    return `Too many failed logins from your address. Try again in ${plural(error.retryAfter ?? 60, "second")}.`;
  }
  return error.message || "The service did not respond. Try again.";
}
