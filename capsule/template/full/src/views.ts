import { find } from "./dom.ts";

const PARTS = ["#welcome", "#app-title", "#notes", "#ask", "#failed"] as const;

/** Shows these parts of the page, and hides the others. */
export function showOnly(...shown: (typeof PARTS)[number][]): void {
  for (const part of PARTS) find(part, HTMLElement).hidden = !shown.includes(part);
}

/** Opens the view that the address names. Where there is room, both are visible. */
export function openView(): void {
  const view = location.hash === "#ask" ? "ask" : "notes";
  document.body.dataset["view"] = view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
