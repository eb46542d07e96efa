// The documentation's page: search, a button that copies each block of code, and the name of the reader's app in examples.

import { h } from "/pages/dom.js";

const MOST = 12; // results

// -- search -------------------------------------------------------------------------------------------------------

const input = document.querySelector("#search");
const found = document.querySelector("#found");
let index = null; // of [address, page, section, text]
let chosen = -1;

async function load() {
  index ??= fetch("/docs/search.json").then((response) => response.json());
  return index;
}

// Returns the entries that contain each word, those with the words in their titles first.
function rank(entries, words) {
  const score = ([, page, section, text]) => {
    const [title, body] = [`${section} ${page}`.toLowerCase(), text.toLowerCase()];
    let sum = 0;
    for (const word of words) {
      if (section.toLowerCase().startsWith(word)) sum += 8;
      else if (title.includes(word)) sum += 4;
      else if (body.includes(word)) sum += 1;
      else return 0;
    }
    return sum;
  };
  return entries
    .map((entry) => [score(entry), entry])
    .filter(([points]) => points)
    .sort(([one], [other]) => other - one)
    .slice(0, MOST)
    .map(([, entry]) => entry);
}

async function search() {
  const text = input.value;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const entries = words.length ? rank(await load(), words) : [];
  if (input.value !== text) return; // the index took a while
  chosen = -1;
  const option = ([address, page, section], n) =>
    h(
      "a",
      { href: address, role: "option", id: `found-${n}`, tabindex: "-1", "aria-selected": "false" },
      section,
      section !== page && h("span", { class: "small quiet" }, page),
    );
  const nothing = words.length > 0 && h("p", { class: "quiet", role: "option", "aria-selected": "false" }, "Nothing found");
  found.replaceChildren(...(entries.length ? entries.map(option) : [nothing].filter(Boolean)));
  show(words.length > 0);
}

function show(open) {
  found.hidden = !open;
  input.setAttribute("aria-expanded", String(open));
  if (!open) input.removeAttribute("aria-activedescendant");
}

function choose(step) {
  const options = [...found.querySelectorAll("a")];
  if (!options.length) return;
  options[chosen]?.setAttribute("aria-selected", "false");
  chosen = (chosen + step + options.length) % options.length;
  options[chosen].setAttribute("aria-selected", "true");
  options[chosen].scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-activedescendant", options[chosen].id);
}

input.addEventListener("focus", load, { once: true });
input.addEventListener("input", search);
input.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    choose(event.key === "ArrowDown" ? 1 : chosen < 0 ? 0 : -1);
  } else if (event.key === "Enter") {
    (found.querySelector('[aria-selected="true"]') ?? found.querySelector("a"))?.click();
    show(false);
  } else if (event.key === "Escape") {
    show(false);
  }
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input, textarea, select")) return;
  event.preventDefault();
  input.focus();
});
addEventListener("click", (event) => event.target.closest("search") || show(false));

// -- code and anchors ---------------------------------------------------------------------------------------------

const status = document.querySelector("#status");

for (const block of document.querySelectorAll("main pre")) {
  const copy = async () => {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
    status.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2_000);
  };
  const button = h("button", { type: "button", class: "plain", onclick: copy }, "Copy");
  const frame = h("div", { class: "code" });
  block.replaceWith(frame);
  frame.append(block, button);
}

// In examples, the first app of a reader who is logged in takes the place of <app>.
async function nameApp() {
  const blocks = [...document.querySelectorAll("main code")].filter((code) => code.textContent.includes("/<app>"));
  if (!blocks.length) return;
  const response = await fetch("/account/apps");
  const [app] = response.ok ? await response.json() : [];
  if (!app) return;
  for (const code of blocks) code.textContent = code.textContent.replaceAll("/<app>", `/${app.name}`);
}

// An operation of the reference is folded; a link to it unfolds it.
function unfold() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName === "DETAILS") target.open = true;
}

if (matchMedia("(max-width: 60rem)").matches) document.querySelector(".contents").open = false;
addEventListener("hashchange", unfold);
unfold();
nameApp().catch(() => {}); // the examples stay general
