// Shows a log: lines with times, a filter, and, while it is followed, the newest line in view.

import { h } from "/pages/dom.js";
import { plural } from "/pages/format.js";
import { announce } from "./parts.js";

const MAX_LINES = 20_000; // older ones are removed from the page
const FAILING = 100; // lines at the end among which the one that failed is looked for
const FAILURE = /\b(?:\w*(?:Error|Exception)|ERR!|panic(?:ked)?|Traceback)\b|\b(?:error|fatal|failed)\b/i;
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export class LogView {
  // `file` is the name of the download, `missing` the text of an empty log.
  constructor(label, file, missing) {
    this.lines = []; // { text, at, row }; `at` in ms, or null
    this.top = 0; // where the log was scrolled to when the state of the button was last set
    this.failure = null; // the row to show as soon as the log is in the page
    this.file = file;
    this.log = h("pre", { class: "log", role: "log", tabindex: "0", "aria-label": label }, missing);
    this.search = h("input", { type: "search", placeholder: "Filter lines", "aria-label": `Filter: ${label}` });
    this.found = h("span", { class: "small quiet" });
    this.following = h("button", { type: "button", class: "plain", "aria-pressed": "true" }, "Follow");
    const save = h("button", { type: "button", class: "plain", onclick: () => this.save() }, "Download");
    this.search.addEventListener("input", () => this.filter());
    this.following.addEventListener("click", () => this.follow(!this.isFollowed));
    this.log.addEventListener("scroll", () => this.press(this.isAtEnd));
    // It has no height before it is in the page. When its height changes, its end moves.
    new ResizeObserver(() => (this.failure ? this.reveal() : this.isFollowed && this.follow(true))).observe(this.log);
    this.panel = h(
      "div",
      { class: "stack" },
      h("div", { class: "row tools" }, this.search, this.found, h("span", { class: "row" }, this.following, save)),
      this.log,
    );
  }

  // The event of a reader who has just scrolled comes with the next frame; lines may come before it.
  get isFollowed() {
    if (this.log.scrollTop !== this.top) return this.isAtEnd;
    return this.following.getAttribute("aria-pressed") === "true";
  }

  get isAtEnd() {
    return this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
  }

  press(on) {
    this.following.setAttribute("aria-pressed", on);
    this.top = this.log.scrollTop;
  }

  follow(on) {
    if (on) this.log.scrollTop = this.log.scrollHeight;
    this.press(on);
  }

  say(text) {
    if (!this.lines.length && this.log.textContent !== text) this.log.textContent = text;
  }

  add(lines) {
    if (!lines.length) return;
    if (!this.lines.length) this.log.textContent = "";
    const follows = this.isFollowed; // the new lines move the end
    const wanted = this.search.value.toLowerCase();
    const added = lines.map(({ text, at }) => ({ text, at, row: row(text, at) }));
    for (const line of added) line.row.hidden = !line.text.toLowerCase().includes(wanted);
    this.log.append(...added.map((line) => line.row));
    this.lines.push(...added);
    for (const line of this.lines.splice(0, this.lines.length - MAX_LINES)) line.row.remove();
    if (follows) this.follow(true);
    if (wanted) this.count();
  }

  // Marks the line at which something failed, and shows it unless the reader has scrolled away.
  markFailure() {
    const { row } = this.lines.slice(-FAILING).find(({ text }) => FAILURE.test(text)) ?? {};
    if (!row || row.classList.contains("failing")) return;
    row.classList.add("failing");
    if (!this.isFollowed) return;
    this.failure = row;
    this.reveal();
  }

  reveal() {
    if (!this.log.clientHeight) return;
    this.log.scrollTop += this.failure.getBoundingClientRect().top - this.log.getBoundingClientRect().top - this.log.clientHeight / 3;
    this.press(this.isAtEnd);
    this.failure = null;
  }

  clear() {
    this.lines = [];
    this.log.textContent = "";
    this.top = 0;
  }

  filter() {
    const follows = this.isFollowed;
    const wanted = this.search.value.toLowerCase();
    for (const { text, row } of this.lines) row.hidden = !text.toLowerCase().includes(wanted);
    if (follows) this.follow(true);
    this.found.textContent = "";
    if (!wanted) return;
    this.count();
    announce(this.found.textContent);
  }

  count() {
    const matches = this.lines.filter(({ row }) => !row.hidden).length;
    this.found.textContent = `${plural(matches, "match", "matches")} in ${plural(this.lines.length, "line")}`;
  }

  save() {
    const text = this.lines.map(({ text, at }) => (at === null ? text : `${new Date(at).toISOString()} ${text}`));
    const url = URL.createObjectURL(new Blob([`${text.join("\n")}\n`], { type: "text/plain" }));
    h("a", { href: url, download: this.file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
}

function row(text, at) {
  const time = at !== null && h("time", { datetime: new Date(at).toISOString() }, clock.format(at));
  return h("span", { class: "line" }, time, `${text}\n`);
}
