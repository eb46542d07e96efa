// The overview: requests, models, spending, problems, and the switch of inference.

import { chart } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { money, roughly } from "/pages/format.js";
import { outcomeSeries } from "/pages/outcomes.js";
import { get } from "/dashboard/api.js";
import { facts, note } from "/dashboard/parts.js";
import { attach } from "./switches.js";
import { periodLinks } from "./usage.js";

export const title = "Overview";
export const live = true;

const PERIODS = { hour: ["Last hour"], "24h": ["24 hours", 24], "7d": ["7 days", 168] };

export async function draw(signal, _, query) {
  const period = query.get("period") in PERIODS ? query.get("period") : "hour";
  const [name, hours] = PERIODS[period];
  const rows = hours && (await get(`/platform/usage?hours=${2 * hours}`, signal));
  const view = document.querySelector("#overview").content.cloneNode(true);
  attach(view);
  view.querySelector("#periods").append(...periodLinks("#/", PERIODS, period));
  if (rows) {
    const place = view.querySelector("#requests");
    place.removeAttribute("id"); // the live figures are those of the last hour
    place.append(...history(name, rows.slice(0, hours), rows.slice(hours)));
  }
  return [...view.children];
}

// Draws a period by hour, and compares it with the one before.
function history(name, before, rows) {
  const sum = (of, field) => of.reduce((total, row) => total + row[field], 0);
  const times = rows.map(({ hour }) => Date.parse(hour));
  const spent = [{ name: "spent", tone: "plain", values: rows.map(({ nanoEuro }) => nanoEuro) }];
  const trend = (field, show) => [show(sum(rows, field)), note(change(sum(before, field), sum(rows, field)))];
  return [
    facts({ Requests: trend("requests", roughly), Spending: trend("nanoEuro", money) }),
    h(
      "div",
      { class: "pair" },
      h("div", {}, chart("Requests by hour", outcomeSeries(rows), times, { span: name })),
      h("div", {}, chart("Spending by hour", spent, times, { unit: "spending", show: money, span: name })),
    ),
  ];
}

function change(before, now) {
  if (!before) return "nothing in the period before";
  const percent = Math.round((now / before - 1) * 100);
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent)}% against the period before`;
}
