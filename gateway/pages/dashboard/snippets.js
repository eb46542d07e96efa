// A text to paste elsewhere, with a button that copies it.

import { h } from "/pages/dom.js";
import { announce } from "./parts.js";

export function snippet(label, text) {
  const code = h("code", {}, text);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied");
    } catch {
      getSelection().selectAllChildren(code);
      announce("Selected; copy it with your keyboard");
    }
  };
  const button = h("button", { type: "button", class: "plain", "aria-label": `Copy: ${label}`, onclick: copy }, "Copy");
  return h(
    "figure",
    { class: "snippet" },
    h("figcaption", { class: "row apart small" }, label, button),
    h("pre", { tabindex: "0", "aria-label": label }, code),
  );
}
