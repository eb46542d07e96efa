// A panel at the right of the page with the details of a row.

import { h, showDialog } from "/pages/dom.js";
import { fillFrom } from "./drafts.js";

// Opens the panel, and returns its dialog. Closing it returns the focus.
export function openSheet(title, ...children) {
  const name = h("h2", { id: "sheet", tabindex: "-1", autofocus: true }, title);
  const close = h("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Close");
  const dialog = h(
    "dialog",
    { class: "sheet", "aria-labelledby": "sheet" },
    h("div", { class: "stack" }, h("div", { class: "row apart head" }, name, close), children),
  );
  // The content fills the dialog, so a click on the dialog itself is one on its backdrop. The second of a double click may
  // be one on the row that opened the sheet.
  dialog.addEventListener("click", ({ target, detail }) => target === dialog && detail < 2 && dialog.close());
  showDialog(dialog);
  fillFrom(dialog);
  return dialog;
}
