// Draws counts or money over time as stacked bars, and parts of a whole as one bar.

import { h, svg } from "./dom.js";
import { plural, roughly } from "./format.js";

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const [STEP, HEIGHT, LEAST] = [10, 100, 1.5]; // units of the drawing; LEAST keeps small values visible
const TICKS = 4; // at most, above zero
const LABELS = 7; // at most, along the time
const HINTS = { mouse: "Click", pen: "Tap again", touch: "Tap again", keyboard: "Press Enter" };

const formatter = (options) => new Intl.DateTimeFormat("en-GB", options);
const clock = formatter({ hour: "2-digit", minute: "2-digit" });
const clockAndDate = formatter({ day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const date = formatter({ day: "numeric", month: "short" });
const utcDate = formatter({ day: "numeric", month: "short", timeZone: "UTC" });

const MOVES = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -6, PageUp: 6, Home: -Infinity, End: Infinity };

const positions = new Map(); // the bar that was read last, by the chart's label, so that a refresh keeps it

// `series` are [{ name, tone, values }], bottom first, and `times` are the starts of the bars in milliseconds, at equal
// distances, oldest first. Tones are good, warn, bad, busy, idle, plain and soft. Bars of a day or more are UTC days.
// `show` formats a value, `unit` names what the values count, and `span` names the whole period. A click or Enter on a
// bar calls `onpick` with its start and end in milliseconds.
export function chart(label, series, times, { unit = "requests", show = roughly, span, onpick } = {}) {
  const size = times[1] - times[0] || HOUR;
  const totals = times.map((_, n) => series.reduce((sum, { values }) => sum + values[n], 0));
  const peak = Math.max(...totals, 0);
  const steps = ticks(peak, show === roughly ? 1 : 0);
  const top = steps.at(-1);
  const sums = series.map(({ name, tone, values }) => [tone, name, show(values.reduce((sum, value) => sum + value, 0))]);
  const period = span ?? plural(times.length, size < HOUR ? "minute" : size < DAY ? "hour" : "day");
  const spoken = sums.map(([, name, sum]) => `${sum} ${name}`).join(", ");
  const most = peak ? `; most from ${nameTime(times[totals.indexOf(peak)], size)}` : "";
  const valuesAt = (n) =>
    series.filter(({ values }) => values[n]).map(({ tone, name, values }) => [tone, name, show(values[n])]);
  const text = (n) => {
    const values = valuesAt(n).map(([, name, value]) => `${value} ${name}`);
    return `${nameTime(times[n], size)}: ${values.join(", ") || `no ${unit}`}`;
  };
  const tip = (n, hint) => [
    h("strong", {}, nameTime(times[n], size)),
    totals[n] ? key(valuesAt(n)) : h("span", {}, `No ${unit}`),
    onpick && totals[n] > 0 && h("span", { class: "quiet" }, `${hint} to see the requests`),
  ];
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${times.length * STEP} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${label}: ${spoken} in ${period}${most}`,
    },
    times.map((_, n) => column(n, series, top)),
  );
  return h(
    "figure",
    { class: "chart" },
    h("figcaption", { class: "row apart" }, h("h3", { class: "small" }, label), key(sums)),
    h(
      "div",
      { class: "axes" },
      h("div", { class: "values", "aria-hidden": "true" }, (peak ? steps : [0]).map((tick) => at("bottom", tick / top, show(tick)))),
      h(
        "div",
        { class: "plot" },
        h("div", { class: "grid", "aria-hidden": "true" }, steps.map((tick) => at("bottom", tick / top))),
        drawing,
        slider(label, times.length, text, tip, onpick && ((n) => onpick(times[n], times[n] + size))),
      ),
      h("div", { class: "times", "aria-hidden": "true" }, timeLabels(times, size)),
    ),
    h("div", { class: "unseen" }, alternative(label, series, times, size, totals, show)),
  );
}

// Small bars without labels, for a card. The text beside them says what they show.
export function sparkline(values, tone = "plain") {
  const top = Math.max(...values, 1);
  const properties = { class: "sparkline", viewBox: `0 0 ${values.length * STEP} ${HEIGHT}`, preserveAspectRatio: "none" };
  return svg(
    "svg",
    { ...properties, "aria-hidden": "true" },
    values.map((_, n) => column(n, [{ tone, values }], top)),
  );
}

// Round values from zero to at least the peak.
function ticks(peak, least) {
  const rough = Math.max(peak / TICKS, least) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * 0.999);
  return Array.from({ length: Math.max(Math.ceil(peak / step), 1) + 1 }, (_, n) => n * step);
}

function column(n, series, top) {
  let y = HEIGHT;
  const parts = series.map(({ tone, values }) => {
    const height = values[n] > 0 && Math.max((values[n] / top) * HEIGHT, LEAST);
    y -= height;
    return height > 0 && svg("rect", { class: tone, x: n * STEP + 1, y: Math.max(y, 0), width: STEP - 2, height });
  });
  return svg("g", {}, parts);
}

function at(side, share, ...children) {
  const element = h("span", {}, children);
  element.style[side] = `${share * 100}%`;
  return element;
}

function nameTime(time, size) {
  if (size >= DAY) return utcDate.format(time);
  return (size < HOUR ? clock : clockAndDate)[size > MINUTE ? "formatRange" : "format"](time, time + size);
}

// Labels whole days, hours or quarters of an hour, as many as fit.
function timeLabels(times, size) {
  const [length, last] = [times.length, times.at(-1)];
  const days = last - times[0] > 2 * DAY;
  const format = size >= DAY ? utcDate : days ? date : clock;
  const minutes = (time) => new Date(time).getHours() * 60 + new Date(time).getMinutes();
  const isRound = (time) => size >= DAY || minutes(time) % (days ? 1440 : size >= HOUR ? 360 : 15) === 0;
  const round = times.flatMap((time, n) => (isRound(time) ? [n] : []));
  const chosen = round.length > 1 ? round : times.map((_, n) => n);
  const every = Math.ceil(chosen.length / LABELS);
  const position = (n) => (n + 0.5) / length;
  return chosen
    .filter((_, n) => n % every === 0)
    .filter((n) => length < 3 || (position(n) > 0.02 && position(n) < 0.98))
    .map((n) => at("left", position(n), format.format(times[n])));
}

// Returns what lies above `length` bars of one width and takes the pointer and the focus: a mark, a slider and a tooltip.
// It is a slider, so that screen readers read each bar. `text` and `tip` describe the bar n, and `pick` opens it.
export function slider(label, length, text, tip, pick) {
  const box = h("div", { class: "tip", hidden: true });
  const mark = h("div", { class: "mark", hidden: true });
  const limits = { "aria-valuemin": 0, "aria-valuemax": length - 1 };
  const properties = { role: "slider", tabindex: 0, "aria-label": `${label}, bar by bar`, "data-focus": `chart ${label}`, ...limits };
  const control = h("div", { class: pick ? "reader opens" : "reader", ...properties });
  let current = length - 1;
  let wasShown = false;
  const select = (n) => {
    current = Math.min(Math.max(n, 0), length - 1);
    control.setAttribute("aria-valuenow", current);
    control.setAttribute("aria-valuetext", text(current));
  };
  const open = (n, input) => {
    select(n);
    positions.set(label, current);
    box.replaceChildren(...tip(current, HINTS[input]).filter(Boolean));
    box.hidden = mark.hidden = false;
    mark.style.width = `${100 / length}%`;
    mark.style.left = `${(current * 100) / length}%`;
    const share = ((current + 0.5) / length) * 100;
    box.style.left = `${share}%`;
    box.style.translate = `${-share}%`; // stays within the chart
  };
  const close = () => (box.hidden = mark.hidden = true);
  const find = ({ clientX }) => {
    const { left, width } = control.getBoundingClientRect();
    return Math.min(Math.max(Math.floor(((clientX - left) / width) * length), 0), length - 1);
  };
  control.addEventListener("pointerdown", (event) => {
    wasShown = !box.hidden && find(event) === current;
    open(find(event), event.pointerType);
  });
  control.addEventListener("pointermove", (event) => open(find(event), event.pointerType));
  control.addEventListener("pointerleave", ({ pointerType }) => pointerType === "mouse" && close());
  // The first tap shows the values. A mouse shows them before the click.
  control.addEventListener("click", ({ pointerType }) => (pointerType === "mouse" || wasShown) && pick?.(current));
  control.addEventListener("focus", () => control.matches(":focus-visible") && open(current, "keyboard"));
  control.addEventListener("blur", close);
  control.addEventListener("keydown", (event) => {
    if (event.key === "Enter") pick?.(current);
    else if (event.key === "Escape") close();
    else if (event.key in MOVES) {
      event.preventDefault();
      open(current + MOVES[event.key], "keyboard");
    }
  });
  select(positions.get(label) ?? current);
  return [mark, control, box];
}

function alternative(label, series, times, size, totals, show) {
  const cells = (n) => series.map(({ values }) => h("td", {}, show(values[n])));
  const line = (time, n) => totals[n] > 0 && h("tr", {}, h("th", { scope: "row" }, nameTime(time, size)), cells(n));
  return h(
    "table",
    {},
    h("caption", {}, `${label}, in numbers`),
    h("thead", {}, h("tr", {}, ["Time", ...series.map(({ name }) => name)].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, times.map(line)),
  );
}

// Draws the legend from entries [class of the swatch, name, value].
export function key(entries) {
  const item = ([swatch, name, value]) => h("li", {}, swatch && h("i", { class: swatch }), h("b", {}, value), name);
  return h("ul", { class: "key" }, entries.map(item));
}

export function share(whole, parts, spoken) {
  const bar = h("div", { class: "bar", role: "img", "aria-label": spoken });
  for (const [name, value] of Object.entries(parts)) {
    if (value <= 0) continue;
    const part = h("span", { class: name });
    part.style.width = `${Math.min(100, (value / Math.max(whole, 1)) * 100)}%`;
    bar.append(part);
  }
  return bar;
}
