// Draws an app's health history: one bar per day, with its text.

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
  const fell = down > 0 ? `Down for ${duration(down)} in ${plural(outages, "outage")}` : "No outage";
  return [
    h("ol", { class: "days", "aria-label": "Health, day by day" }, days.map(bar)),
    h(
      "div",
      { class: "row apart small quiet", "aria-hidden": "true" },
      h("span", {}, date.format(Date.parse(days[0].day))),
      h("span", {}, "Today, in UTC"),
    ),
    h("p", { class: "small" }, `${fell} in ${plural(probed.length, "day")} of probes.`),
  ];
}

function bar({ day, downMs, outages }) {
  const words =
    downMs === null ? "not probed" : downMs ? `down for ${duration(downMs)} in ${plural(outages, "outage")}` : "no outage";
  const tone = downMs === null ? "unknown" : downMs ? "down" : "up";
  const text = `${date.format(Date.parse(day))}: ${words}`;
  return h("li", { class: tone, title: text }, h("span", { class: "unseen" }, text));
}
