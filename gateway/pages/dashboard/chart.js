// Draws hours or days as stacked bars, and parts of a whole as one bar.

import { h, svg } from "/pages/dom.js";
import { roughly } from "/pages/format.js";

const [STEP, HEIGHT] = [10, 96];
const CLASSES = ["first", "second", "third"];
export const OUTCOMES = ["answered", "refused", "interrupted"]; // the classes of a chart of requests

// `rows` are oldest first. `series` maps up to three names, bottom first, to functions from a row to its value.
// `of` formats a row's time, `span` names the whole period, `ticks` are the labels below, and `show` formats a value.
export function bars(label, rows, series, { of, span, ticks, show = roughly, classes = CLASSES }) {
  const names = Object.keys(series);
  const totals = rows.map((row) => names.reduce((sum, name) => sum + series[name](row), 0));
  const peak = Math.max(...totals);
  const sums = names.map((name) => show(rows.reduce((sum, row) => sum + series[name](row), 0)));
  const spoken = names.map((name, n) => `${sums[n]} ${name}`).join(", ");
  const most = of(rows[totals.indexOf(peak)]);
  const words = (row) => `${of(row)}: ${names.map((name) => `${show(series[name](row))} ${name}`).join(", ")}`;
  const columns = rows.map((row, n) => column(n * STEP, Object.values(series), classes, row, peak, words(row)));
  return h(
    "figure",
    { class: "chart" },
    h(
      "figcaption",
      { class: "row apart" },
      h("h3", { class: "small" }, label),
      key(names.map((name, n) => [classes[n], name, sums[n]])),
    ),
    svg(
      "svg",
      {
        viewBox: `0 0 ${rows.length * STEP} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${label}: ${spoken} in ${span}; most from ${most}`,
      },
      columns,
    ),
    h("div", { class: "hours", "aria-hidden": "true" }, ticks.map((tick) => h("span", {}, tick))),
  );
}

function column(x, series, classes, row, peak, words) {
  let top = HEIGHT;
  const parts = series.map((of, n) => {
    // At least three units high, so that small values are visible. A gap of one separates it from the part below.
    const height = of(row) && Math.max((of(row) / peak) * (HEIGHT - 3 * series.length), 3);
    const gap = top < HEIGHT ? 1 : 0;
    top -= height;
    return height > 0 && svg("rect", { class: classes[n], x: x + 1, y: top, width: STEP - 2, height: height - gap });
  });
  const over = svg("rect", { class: "over", x, y: 0, width: STEP, height: HEIGHT });
  return svg("g", {}, svg("title", {}, words), over, parts);
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
