// Asks an operator to confirm a change that affects others, and why it is made. Makes the change.

import { h, showDialog } from "/pages/dom.js";
import { call } from "/dashboard/api.js";
import { announce } from "/dashboard/parts.js";

const MOST = 500; // characters of a reason

// Resolves with the reason, "" without one, or null if the operator cancels. `type` is a name to type first, for a change
// that must not be a slip. `label` names the reason, and `required` says that there must be one.
export async function confirmAction(title, text, action, { type = "", required = false, label = "Reason, for the audit trail" } = {}) {
  const typed = h("input", { id: "typed", autocomplete: "off", autocapitalize: "none", spellcheck: "false" });
  const reason = h("textarea", { id: "reason", maxlength: MOST, rows: 2, "aria-describedby": "sure-text" });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const cancel = h("button", { type: "button", autofocus: !type && !required, onclick: () => dialog.close("") }, "Cancel");
  const refuse = (control, words) => {
    refusal.textContent = words;
    control.setAttribute("aria-invalid", "true");
    control.focus();
  };
  const submit = (event) => {
    event.preventDefault();
    if (type && typed.value.trim() !== type) return refuse(typed, `Type ${type} to continue.`);
    if (required && !reason.value.trim()) return refuse(reason, "Give a reason.");
    dialog.close("yes");
  };
  const form = h(
    "form",
    { onsubmit: submit },
    h("h2", { id: "sure-title" }, title),
    h("p", { id: "sure-text" }, text),
    type && h("div", { class: "field" }, h("label", { for: "typed" }, "Type ", h("code", {}, type), " to confirm"), typed),
    h("div", { class: "field" }, h("label", { for: "reason" }, required ? label : `${label} (optional)`), reason),
    refusal,
    h("div", { class: "row" }, cancel, h("button", { class: "danger" }, action)),
  );
  const dialog = h("dialog", { "aria-labelledby": "sure-title", "aria-describedby": "sure-text" }, form);
  const answer = showDialog(dialog);
  if (type) typed.focus();
  else if (required) reason.focus();
  return (await answer) === "yes" ? reason.value.trim().replace(/\s+/g, " ") : null;
}

// Draws the view again after the change, unless the operator has opened another one meanwhile. Announces `text`.
export async function makeChange(method, path, options, text) {
  const here = location.href;
  await call(method, path, options);
  if (location.href === here) dispatchEvent(new CustomEvent("show-again", { detail: text }));
  else announce(text);
}
