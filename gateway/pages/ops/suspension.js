// Suspends and resumes an app or an account.

import { h } from "/pages/dom.js";
import { since } from "/pages/format.js";
import { call } from "/dashboard/api.js";
import { action, badge } from "/dashboard/parts.js";
import { askReason, confirmAction } from "./confirm.js";

const EFFECT = "Requests and pages are refused within a second, builds are canceled, and start commands stop.";

export function suspended({ suspension, accountSuspension }) {
  const found = suspension ?? accountSuspension;
  const text = suspension ? "Suspended" : "Account suspended";
  return found && [badge(text, "bad"), h("span", { class: "small quiet" }, since(found.at), " · ", found.reason)];
}

// `at` is the address of the app or the account, and `line` shows why the service refused.
export function brake(at, name, suspension, line) {
  if (!suspension) return action("Suspend", { class: "danger", "aria-label": `Suspend ${name}` }, line, () => suspend(at, name));
  return action("Resume", { "aria-label": `Resume ${name}` }, line, () => resume(at, name));
}

async function suspend(at, name) {
  const reason = await askReason(`Suspend ${name}?`, EFFECT, "Suspend");
  if (!reason) return;
  await call("PUT", `${at}/suspension`, { body: { reason } });
  dispatchEvent(new CustomEvent("show-again", { detail: `${name} is suspended.` }));
}

async function resume(at, name) {
  const text = "Requests, pages and deploys work again within a second. Canceled deploys stay canceled.";
  if (!(await confirmAction(`Resume ${name}?`, text, "Resume"))) return;
  await call("DELETE", `${at}/suspension`);
  dispatchEvent(new CustomEvent("show-again", { detail: `The suspension of ${name} is lifted.` }));
}
