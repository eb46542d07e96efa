// A text to paste elsewhere, with a copy button.

import { h } from "/pages/dom.js";
import { copyText } from "./parts.js";

export function snippet(label, text) {
  const code = h("code", {}, text);
  const copy = () => copyText(text, code);
  const button = h("button", { type: "button", class: "plain", "aria-label": `Copy: ${label}`, onclick: copy }, "Copy");
  return h(
    "figure",
    { class: "snippet" },
    h("figcaption", { class: "row apart small" }, label, button),
    h("pre", { tabindex: "0", "aria-label": label }, code),
  );
}
