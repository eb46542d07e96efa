// Formats money, times and counts for people.

import { h } from "./dom.js";

const euros = (digits) => new Intl.NumberFormat("en-IE", { style: "currency", currency: "EUR", ...digits });
const cents = euros({});
const fractions = euros({ minimumFractionDigits: 2, maximumSignificantDigits: 2, maximumFractionDigits: 9 });
const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const ago = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const timeFormat = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });

// Amounts below a cent get two significant digits.
export function money(nanoEuro) {
  const amount = nanoEuro / 1e9;
  return amount !== 0 && Math.abs(amount) < 0.01 ? fractions.format(amount) : cents.format(amount);
}

// What is left of a cap. A small amount that was used is not rounded away.
export function moneyLeft(cap, used) {
  const left = money(Math.max(0, cap - used));
  return used > 0 && left === money(cap) ? `almost ${left}` : left;
}

export const count = (number) => whole.format(number);
export const roughly = (number) => short.format(number);

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const UNITS = [
  [2 ** 30, "GB"],
  [2 ** 20, "MB"],
  [2 ** 10, "KB"],
];

// Formats bytes. A KB is 1,024 bytes, as in the service's limits.
export function size(bytes) {
  const [factor, unit] = UNITS.find(([least]) => bytes >= least) ?? [];
  return unit ? `${tenths.format(bytes / factor)} ${unit}` : plural(bytes, "byte");
}

// An address without its scheme.
export const bare = (url) => url.replace(/^https?:\/\//, "");

export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// Turns a word of the API into a label.
export const capital = (word) => sentence(word).replaceAll("-", " ");

const STEPS = [
  ["day", 86_400],
  ["hour", 3600],
  ["minute", 60],
];

const largest = (seconds) => STEPS.find(([, size]) => seconds >= size * 0.95) ?? [];

function relative(milliseconds) {
  const seconds = (milliseconds - Date.now()) / 1000;
  const [unit, size] = largest(Math.abs(seconds));
  if (!unit) return seconds < 0 ? "just now" : "in a moment";
  return ago.format(Math.round(seconds / size), unit);
}

function lasting(milliseconds) {
  const seconds = (Date.now() - milliseconds) / 1000;
  const [unit, size] = largest(seconds);
  return unit ? `for ${plural(Math.round(seconds / size), unit)}` : "for a moment";
}

// The date and time, to the second.
export const exact = (iso) => timeFormat.format(Date.parse(iso));

// "3 minutes ago" and "for 3 minutes", with the exact time in the title. `keepCurrent` updates them.
const WORDS = { relative, lasting, running: (milliseconds) => duration(Math.max(0, Date.now() - milliseconds)) };
export const moment = (iso) => time(iso, "relative");
export const since = (iso) => time(iso, "lasting");
export const timer = (iso) => time(iso, "running"); // a timer, such as "12 s"

function time(iso, words) {
  const at = Date.parse(iso);
  if (Number.isNaN(at)) return "–";
  return h("time", { datetime: iso, title: exact(iso), "data-words": words }, WORDS[words](at));
}

export function keepCurrent() {
  for (const time of document.querySelectorAll("time[data-words]")) {
    time.textContent = WORDS[time.dataset.words](Date.parse(time.dateTime));
  }
}

export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}
