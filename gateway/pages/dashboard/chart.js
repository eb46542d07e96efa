// Draws a day's hours as stacked bars, and the parts of a whole as one bar.

import { h, svg } from "/pages/dom.js";
import { roughly } from "/pages/format.js";

const [WIDTH, HEIGHT] = [240, 96];
const CLASSES = ["first", "second"];
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const from = ({ hour }) => clock.format(Date.parse(hour));

// `series`: two names from the bottom up, each with a function from an hour to its value.
export function bars(label, hours, series) {
  const names = Object.keys(series);
  const totals = hours.map((hour) => names.reduce((sum, name) => sum + series[name](hour), 0));
  const peak = Math.max(...totals);
  const sums = names.map((name) => roughly(hours.reduce((sum, hour) => sum + series[name](hour), 0)));
  const spoken = names.map((name, n) => `${sums[n]} ${name}`).join(", ");
  const most = from(hours[totals.indexOf(peak)]);
  const columns = hours.map((hour, n) => column(hour, (n * WIDTH) / hours.length, WIDTH / hours.length, series, peak));
  return h(
    "figure",
    { class: "chart" },
    h(
      "figcaption",
      { class: "row apart" },
      h("h3", { class: "small" }, label),
      key(names.map((name, n) => [CLASSES[n], name, sums[n]])),
    ),
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${label}: ${spoken} in 24 hours; most from ${most}`,
      },
      columns,
    ),
    h(
      "div",
      { class: "hours", "aria-hidden": "true" },
      [0, 6, 12, 18].map((n) => h("span", {}, from(hours[n]))),
      h("span", {}, "now"),
    ),
  );
}

function column(hour, x, width, series, peak) {
  let top = HEIGHT;
  const parts = Object.values(series).map((of, n) => {
    // At least two units high, so that small values stay visible.
    const height = of(hour) && Math.max((of(hour) / peak) * (HEIGHT - 2), 2);
    top -= height;
    return height > 0 && svg("rect", { class: CLASSES[n], x: x + 1, y: top, width: width - 2, height });
  });
  const words = Object.entries(series).map(([name, of]) => `${roughly(of(hour))} ${name}`);
  const over = svg("rect", { class: "over", x, y: 0, width, height: HEIGHT });
  return svg("g", {}, svg("title", {}, `${from(hour)}: ${words.join(", ")}`), over, parts);
}

// [class of the swatch, name, value]
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
