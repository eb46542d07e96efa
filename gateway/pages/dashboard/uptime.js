// Draws an app's health history: one bar per day, with its text.

import { slider } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { duration, plural } from "/pages/format.js";
import { empty } from "./parts.js";

const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

export function healthDays(days) {
  const probed = days.filter(({ downMs }) => downMs !== null);
  if (!probed.length) {
    const plans = "On the Starter plan and above, live apps are probed every minute. One bar per day appears here.";
    return empty("Not probed yet", plans);
  }
  const [down, outages] = ["downMs", "outages"].map((name) => probed.reduce((sum, day) => sum + day[name], 0));
  const fell = down > 0 ? `Down for ${duration(down)}${inOutages(outages)}` : "No outage";
  const texts = days.map(describe);
  const list = h("ol", { class: "days", "aria-label": "Health, day by day" }, days.map((day, n) => bar(day, texts[n])));
  const tip = (n) => [h("span", {}, texts[n])];
  return [
    h(
      "div",
      { class: "chart uptime" },
      h("div", { class: "plot" }, list, slider("Health", days.length, (n) => texts[n], tip)),
      h(
        "div",
        { class: "row apart small quiet", "aria-hidden": "true" },
        h("span", {}, date.format(Date.parse(days[0].day))),
        h("span", {}, "Today, in UTC"),
      ),
    ),
    h("p", { class: "small" }, `${fell} in ${plural(probed.length, "day")} of probes.`),
  ];
}

function describe({ day, downMs, outages }) {
  const words = downMs === null ? "not probed" : downMs ? `down for ${duration(downMs)}${inOutages(outages)}` : "no outage";
  return `${date.format(Date.parse(day))}: ${words}`;
}

// An outage counts on its first day only.
const inOutages = (outages) => (outages ? ` in ${plural(outages, "outage")}` : "");

const bar = ({ downMs }, text) =>
  h("li", { class: downMs === null ? "unknown" : downMs ? "down" : "up" }, h("span", { class: "unseen" }, text));
