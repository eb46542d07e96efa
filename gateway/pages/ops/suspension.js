// Suspends and resumes an app or an account.

import { h } from "/pages/dom.js";
import { since } from "/pages/format.js";
import { action, badge } from "/dashboard/parts.js";
import { confirmAction, makeChange } from "./confirm.js";

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
  const asked = { required: true, label: "Reason, which the owner sees" };
  const reason = await confirmAction(`Suspend ${name}?`, EFFECT, "Suspend", asked);
  if (reason === null) return;
  await makeChange("PUT", `${at}/suspension`, { body: { reason } }, `${name} is suspended.`);
}

async function resume(at, name) {
  const text = "Requests, pages and deploys work again within a second. Canceled deploys stay canceled.";
  const reason = await confirmAction(`Resume ${name}?`, text, "Resume");
  if (reason === null) return;
  await makeChange("DELETE", `${at}/suspension`, { reason }, `The suspension of ${name} is lifted.`);
}
