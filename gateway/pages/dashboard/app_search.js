// Finds one of many apps by a part of its name: for the switch of apps, and wherever a form or a filter asks for an app.

import { h, showDialog } from "/pages/dom.js";
import { plural } from "/pages/format.js";

const FEW = 13; // entries that are listed at once

let draw = () => {}; // while the dialog is open

export const redrawAppSearch = () => draw();

// `names` returns the names of the apps, and '' for all of them. `entry` makes what leads to one. It closes the dialog, and
// Enter clicks the first of those that are searched for.
export async function openAppSearch(label, names, entry) {
  const find = h("input", { type: "search", "aria-label": "Find an app", placeholder: "Find an app", autocomplete: "off", spellcheck: "false" });
  const list = h("ul", { class: "apps-found", onclick: ({ target }) => target.closest("a, button") && dialog.close() });
  const rest = h("p", { class: "small quiet", role: "status" });
  draw = () => {
    const wanted = find.value.trim().toLowerCase();
    const found = names().filter((name) => name.includes(wanted));
    const hidden = found.length - FEW;
    list.replaceChildren(...found.slice(0, FEW).map((name) => h("li", {}, entry(name))));
    rest.textContent = hidden > 0 ? `And ${plural(hidden, "more app")}. Type a part of the name.` : found.length ? "" : "No such app.";
  };
  find.addEventListener("input", draw);
  draw();
  const submit = (event) => (event.preventDefault(), find.value.trim() && list.querySelector("a, button")?.click());
  const dialog = h("dialog", { class: "switch", "aria-label": label }, h("form", { role: "search", onsubmit: submit }, find), list, rest);
  await showDialog(dialog);
  draw = () => {};
}

const OPENING = new Set([" ", "Enter", "ArrowDown", "ArrowUp", "F4"]);

// A select of many apps opens the search in place of its list, which a browser cannot search.
export function searchable(select) {
  const open = (event) => {
    if (select.options.length <= FEW) return;
    event.preventDefault();
    select.focus();
    const offered = [...select.options].filter(({ disabled }) => !disabled);
    const texts = new Map(offered.map(({ value, text }) => [value, text]));
    const choose = (value) => {
      select.value = value;
      for (const name of ["input", "change"]) select.dispatchEvent(new Event(name, { bubbles: true }));
    };
    openAppSearch("Choose an app", () => [...texts.keys()], (value) =>
      h("button", { type: "button", "aria-current": value === select.value ? "true" : null, onclick: () => choose(value) }, texts.get(value)),
    );
  };
  select.addEventListener("mousedown", (event) => !event.button && !select.disabled && open(event));
  select.addEventListener("keydown", (event) => OPENING.has(event.key) && open(event));
  return select;
}
