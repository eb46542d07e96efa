// Asks an operator for confirmation before a change that affects others.

import { h } from "/pages/dom.js";

// Resolves with whether the operator confirms. `type` is a name to type first, for a change that must not be a slip.
export function confirmAction(title, text, action, type = "") {
  const typed = h("input", { id: "typed", autocomplete: "off", autocapitalize: "none", spellcheck: "false" });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const keep = h("button", { type: "button", autofocus: !type, onclick: () => dialog.close("") }, "Cancel");
  const form = h(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        if (!type || typed.value.trim() === type) return dialog.close("yes");
        refusal.textContent = `Type ${type} to continue.`;
        typed.setAttribute("aria-invalid", "true");
        typed.focus();
      },
    },
    h("h2", { id: "sure-title" }, title),
    h("p", { id: "sure-text" }, text),
    type &&
      h("div", { class: "field" }, h("label", { for: "typed" }, "Type ", h("code", {}, type), " to confirm"), typed),
    type && refusal,
    h("div", { class: "row" }, keep, h("button", { class: "danger" }, action)),
  );
  const dialog = h("dialog", { "aria-labelledby": "sure-title", "aria-describedby": "sure-text" }, form);
  document.body.append(dialog);
  dialog.showModal();
  if (type) typed.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => (dialog.remove(), resolve(dialog.returnValue === "yes")), { once: true });
  });
}

// Asks for the reason of a change, which its account sees. Resolves with the text, or "" if the operator cancels.
export function askReason(title, text, action) {
  const properties = { id: "reason", required: true, maxlength: 500, rows: 3, "aria-describedby": "sure-text" };
  const reason = h("textarea", properties);
  const cancel = h("button", { type: "button", onclick: () => dialog.close("") }, "Cancel");
  const submit = (event) => {
    event.preventDefault();
    if (reason.value.trim()) return dialog.close("yes");
    reason.setAttribute("aria-invalid", "true");
    reason.focus();
  };
  const form = h(
    "form",
    { onsubmit: submit },
    h("h2", { id: "sure-title" }, title),
    h("p", { id: "sure-text" }, text),
    h("div", { class: "field" }, h("label", { for: "reason" }, "Reason, which the owner sees"), reason),
    h("div", { class: "row" }, cancel, h("button", { class: "danger" }, action)),
  );
  const dialog = h("dialog", { "aria-labelledby": "sure-title" }, form);
  document.body.append(dialog);
  dialog.showModal();
  reason.focus();
  return new Promise((resolve) => {
    const close = () => (dialog.remove(), resolve(dialog.returnValue === "yes" ? reason.value.trim() : ""));
    dialog.addEventListener("close", close, { once: true });
  });
}
