// Suspends and resumes an app or an account.

import { h } from "/pages/dom.js";
import { moment, since } from "/pages/format.js";
import { action, badge, heading, note, refusal } from "/dashboard/parts.js";
import { confirmAction, makeChange } from "./confirm.js";

const EFFECT = "Requests and pages are refused within a second, builds are canceled, and start commands stop.";

// What an operator must know of an account or an app, as a badge and a text: that it is suspended, or will be deleted.
function describe({ suspension, accountSuspension, deletesAt }) {
  const found = suspension ?? accountSuspension;
  if (found) return [badge(suspension ? "Suspended" : "Account suspended", "bad"), [since(found.at), " · ", found.reason]];
  return deletesAt ? [badge("Being deleted", "warn"), ["ends ", moment(deletesAt)]] : [badge("Active", "good")];
}

export function stateOf(record) {
  const [mark, text] = describe(record);
  return [mark, text && note(text)];
}

// The heading of an account or an app: its name, its state, and the means against it.
export function headingOf(record, lead, ...means) {
  const [mark, text] = describe(record);
  const line = refusal();
  const buttons = h("div", { class: "row" }, means.map((mean) => mean(line)));
  return [heading(record.name, lead, [mark, buttons]), text && h("p", { class: "late" }, mark.textContent, " ", text), line];
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
