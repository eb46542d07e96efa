// The elements that views are made of.

import { h, isPressed, refocus, showDialog, untilReleased } from "/pages/dom.js";
import { count, plural } from "/pages/format.js";

export const heading = (title, lead, extra) =>
  h(
    "div",
    { class: "heading" },
    h("div", { class: "row" }, h("h1", { tabindex: "-1" }, title), extra),
    lead && h("p", { class: "quiet" }, lead),
  );

export const card = (title, ...children) => h("section", { class: "card" }, title && h("h2", {}, title), children);

export const badge = (text, tone = "") => h("span", { class: `badge ${tone}` }, text);

// What is said about the words before it, in small type. The space keeps both apart, also for screen readers.
export const note = (...text) => [" ", h("span", { class: "small quiet" }, text)];

export function facts(entries, layout = "") {
  const fact = ([name, value]) => value && h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h("dl", { class: `facts ${layout}` }, Object.entries(entries).map(fact));
}

export const empty = (title, text) => h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, text));

export function skeleton(title) {
  const bones = () =>
    h(
      "div",
      { class: "card", "aria-hidden": "true" },
      [1, 2, 3].map(() => h("div", { class: "bone" })),
    );
  return [heading(title), h("p", { class: "unseen" }, "Loading"), bones(), bones()];
}

// `columns` maps a heading to a function from a row to the cell's content. The column of buttons has an empty heading.
// `layout` is a CSS class that sets the table's layout on a phone.
export function table(label, columns, rows, layout = "stacked") {
  const head = (name) => h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "Actions"));
  const cell = (row, [name, show], n) => {
    if (!name) return h("td", { class: "act end" }, show(row));
    return h(n ? "td" : "th", { scope: n ? null : "row", "data-name": name }, h("div", { class: "cut" }, show(row)));
  };
  const line = (row) =>
    h(
      "tr",
      {},
      Object.entries(columns).map((column, n) => cell(row, column, n)),
    );
  return h(
    "table",
    { class: layout },
    h("caption", { class: "unseen" }, label),
    h("thead", {}, h("tr", {}, Object.keys(columns).map(head))),
    h("tbody", {}, rows.map(line)),
  );
}

// Says how many rows there are, with a button that shows more of them.
export const furtherRows = (shown, all, more) =>
  h("div", { class: "row small quiet" }, `The first ${count(shown)} of ${all}`, action("Show more", { "data-focus": "more" }, refusal(), more));

// Marks the link of the page's navigation that leads to the view at `path`.
export function markCurrent(bar, path) {
  for (const link of bar.querySelectorAll("nav a")) {
    const target = link.hash.slice(1);
    const current = target === "/" ? path === "/" || path === "" : path.startsWith(target);
    current ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
}

// -- messages ---------------------------------------------------------------------------------------------------

const status = document.querySelector("#status");

// Tells screen readers. Clears the text first, so that a repeated text is read again.
export function announce(text) {
  status.textContent = "";
  requestAnimationFrame(() => (status.textContent = text));
}

// A visible message above the view.
export const warning = (text) => h("p", { class: "late", role: "alert" }, text);

// The service's messages do not know when to try again.
const withoutAdvice = (message) => message?.replace(/ Try again shortly\.$/, "");

// Returns a title and a text. The text also appears alone, so it does not depend on the title.
export function explain({ status, message, retryAfter }) {
  const later = retryAfter ? `in ${plural(retryAfter, "second")}` : "shortly";
  switch (status) {
    case undefined:
      return ["This page failed", "An error occurred in this page. Reload it to try again."];
    case 0:
      return ["No connection", "The service cannot be reached. Check your connection and try again."];
    case 404:
      return ["Not found", "It may have been deleted, or it belongs to another account."];
    case 429:
      return ["Limit reached", retryAfter ? `${message} Try again ${later}.` : message];
    case 503:
      return ["The service is unavailable", `${withoutAdvice(message) || "The service does not answer."} Try again ${later}.`];
    default:
      return ["The request failed", message || `The service answered with status ${status}.`];
  }
}

export function failure(error, again) {
  const [title, text] = explain(error);
  const button =
    error.status === 404
      ? h("a", { class: "button", href: "#/" }, "Go to the overview")
      : h("button", { type: "button", class: "main", onclick: () => again() }, "Try again");
  return h(
    "section",
    { class: "card trouble", role: "alert" },
    h("h1", { tabindex: "-1" }, title),
    h("p", { class: "quiet" }, text),
    error.requestId && h("p", { class: "small quiet" }, "Request ", h("code", {}, error.requestId)),
    h("div", { class: "row" }, button),
  );
}

export const sessionEnded = () => void dispatchEvent(new Event("session-ended"));

// -- forms ------------------------------------------------------------------------------------------------------

// The line below a form or button that shows why the service refused.
export const refusal = () => h("p", { class: "refusal", role: "alert" });

export const field = (label, control) => h("div", { class: "field" }, h("label", { for: control.id }, label), control);

// With a prompt, no option is preselected, because the first one may be wrong.
export const choice = (id, options, prompt = "") =>
  h(
    "select",
    { id, required: true },
    prompt && options.length > 1 && h("option", { value: "", disabled: true, selected: true }, prompt),
    options.map((option) => h("option", {}, option)),
  );

// Adds the missing options to the select, and keeps its choice. `name` returns the words for a value.
export function offer(select, values, name = (value) => value) {
  const there = new Set([...select.options].map(({ value }) => value));
  const missing = new Set(values.filter(Boolean)).difference(there);
  for (const value of [...missing].sort()) select.append(h("option", { value }, name(value)));
}

// `layout` is a CSS class for the row of fields and button. Without a button, the fields cannot be changed. `work` is called upon submission, as in `action`.
export function form(layout, fields, button, work, extra) {
  const line = refusal();
  const submit = (event) => (event.preventDefault(), attempt(button, line, work));
  const row = h(
    button ? "div" : "fieldset",
    { class: `fields ${layout}`, disabled: !button },
    fields,
    extra ? h("div", { class: "row" }, button, extra) : button,
  );
  return h("form", { class: "stack", onsubmit: submit }, row, line);
}

// `work` can resolve with the address of a view, which opens unless the user has opened another one meanwhile.
export function action(text, properties, line, work) {
  const button = h("button", { type: "button", ...properties }, text);
  button.addEventListener("click", () => attempt(button, line, () => work(button)));
  return button;
}

async function attempt(button, line, work) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true"); // `disabled` would take the focus away
  const here = location.href;
  const next = await run(line, work);
  button.removeAttribute("aria-disabled");
  if (next && location.href === here) location.hash = next;
}

// Runs the work, and shows in the line why it failed. Resolves with what the work does, or with nothing after a failure.
// If the session has ended, the page shows the log-in, and has the view and what was typed again after it.
export async function run(line, work) {
  line.textContent = "";
  try {
    return await work();
  } catch (error) {
    if (error.name === "AbortError") return; // the user has left the view
    if (error.status === 401 && !/^TOKEN_/.test(error.code)) return sessionEnded(); // other codes are about a user's token
    if (error.status === undefined) reportError(error);
    line.textContent = explain(error)[1];
  }
}

// Asks for confirmation before something is lost or sent. Resolves with the answer.
export async function confirmAction(title, text, action, { keep: kept = "Keep it", tone = "danger" } = {}) {
  const keep = h("button", { value: "", autofocus: true }, kept);
  const lose = h("button", { value: "yes", class: tone }, action);
  const dialog = h(
    "dialog",
    { "aria-labelledby": "question", "aria-describedby": "consequence" },
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "question" }, title),
      h("p", { id: "consequence", class: "quiet" }, text),
      h("div", { class: "row" }, keep, lose),
    ),
  );
  return (await showDialog(dialog)) === "yes";
}

// Copies a text, and resolves with true. Without access to the clipboard it selects `element`, which shows the text.
export async function copyText(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied");
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    announce("Selected. Copy it with your keyboard.");
    return false;
  }
}

// A button that does so.
export function copier(text, element, done = () => {}) {
  const copy = async () => {
    if (!(await copyText(text, element))) return;
    button.textContent = "Copied";
    done();
  };
  const button = h("button", { type: "button", onclick: copy }, "Copy");
  return button;
}

// Shows a secret that cannot be shown again. The panel takes the focus and stays until it is dismissed. Until the
// secret is copied, leaving the page or the view needs a confirmation.
export function showOnce(title, warning, secret, ...more) {
  const text = h("code", {}, secret);
  const copied = () => panel.removeAttribute("data-uncopied");
  const dismiss = () => {
    panel.remove();
    document.querySelector("main h1").focus();
  };
  const name = h("h2", { tabindex: "-1" }, title);
  const copying = copier(secret, text, copied);
  copying.className = "main";
  const away = h("button", { type: "button", onclick: dismiss }, "I have stored it");
  const buttons = h("div", { class: "row" }, copying, away);
  const properties = { class: "card once", "data-uncopied": true, oncopy: copied };
  const panel = h("section", properties, name, h("p", {}, warning), h("pre", {}, text), buttons, more);
  queueMicrotask(() => name.focus());
  return panel;
}

const findUncopied = () => document.querySelector("[data-uncopied]");

addEventListener("beforeunload", (event) => findUncopied() && event.preventDefault());

// Resolves with whether this view may be replaced.
export async function mayLeave() {
  if (!findUncopied()) return true;
  const loss = "This page shows a secret that you have not copied. It cannot be shown again.";
  const leaves = await confirmAction("Leave without copying?", loss, "Leave", { keep: "Stay" });
  if (leaves) for (const panel of document.querySelectorAll("[data-uncopied]")) panel.removeAttribute("data-uncopied");
  return leaves;
}

// -- refreshing -------------------------------------------------------------------------------------------------

const drawn = new WeakMap();

// Draws only if the data has changed, so that a refresh keeps a selection and the focus. An element in which the pointer
// is pressed is drawn after the click.
export function redraw(element, data, draw) {
  const text = JSON.stringify(data);
  if (drawn.get(element) === text) return;
  drawn.set(element, text);
  const put = () => {
    if (drawn.get(element) !== text) return; // newer data has come
    const focus = element.contains(document.activeElement) && document.activeElement.dataset.focus;
    element.replaceChildren(...[draw(data)].flat(Infinity).filter(Boolean));
    refocus(element, focus);
  };
  if (isPressed(element)) untilReleased().then(put);
  else put();
}
