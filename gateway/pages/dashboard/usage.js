// Shows the usage and cost of the account's apps, by hour or day, and by app or model.

import { h } from "/pages/dom.js";
import { count, money, plural } from "/pages/format.js";
import { getText } from "./api.js";
import { OUTCOMES, bars } from "./chart.js";
import { action, empty, facts, field, follow, heading, redraw, refusal, table } from "./parts.js";
import { RANGES, addUp, answered, fetchUsage, fill, nameOf, scale, usagePath } from "./periods.js";

export const title = "Usage";

const GROUPS = { app: "App", model: "Model", none: "Time" };
const SHOWN = 60; // rows of the table; the CSV file has all

export async function draw(signal) {
  const range = select("range", Object.entries(RANGES).map(([value, { name }]) => [value, name]));
  const group = select("group", Object.entries(GROUPS));
  const [figures, charts, list] = [1, 2, 3].map(() => h("section", { class: "card" }));
  const refresh = async () => {
    const [chosen, split] = [range.value, group.value];
    const wanted = [fetchUsage(RANGES[chosen], split, signal), fetchUsage(RANGES.month, "none", signal)];
    const [rows, month] = await Promise.all(wanted);
    if (chosen !== range.value || split !== group.value) return; // the choice has changed
    redraw(figures, [chosen, rows, month], () => summary(RANGES[chosen], addUp(rows), addUp(month)));
    redraw(charts, [chosen, fill(RANGES[chosen], rows)], ([, filled]) => timelines(RANGES[chosen], filled));
    redraw(list, [chosen, split, rows], () => breakdown(RANGES[chosen], split, rows));
  };
  // The next refresh, seconds away, reports a failure.
  for (const choice of [range, group]) choice.addEventListener("change", () => refresh().catch(() => {}));
  await refresh();
  follow(10_000, signal, refresh);
  const line = refusal();
  const csv = action("Download CSV", {}, line, () => download(RANGES[range.value], group.value, signal));
  return [
    heading("Usage", "Your apps’ requests and their cost. Hourly figures are kept for 14 days, daily figures for 400 days."),
    h("div", { class: "fields" }, field("Range", range), field("Group by", group), csv),
    line,
    figures,
    charts,
    list,
  ];
}

const select = (id, options) =>
  h("select", { id }, options.map(([value, name]) => h("option", { value }, name)));

function summary({ name }, total, month) {
  const explanation =
    "An interrupted answer ended early because the client disconnected or the provider failed. " +
    "Its number of tokens is unknown, so it is charged at its maximum cost. A lower ";
  return [
    h("h2", {}, name),
    h("p", { class: "figure" }, money(total.nanoEuro), h("small", {}, ` · ${money(month.nanoEuro)} this month`)),
    facts({
      Answered: count(answered(total)),
      Interrupted: `${count(total.interrupted)}, ${money(total.interruptedNanoEuro)}`,
      Refused: count(total.refused),
      "Tokens in": count(total.inputTokens),
      "Tokens out": count(total.outputTokens),
    }),
    total.interrupted > 0 &&
      h("p", { class: "small quiet" }, explanation, h("code", {}, "maxTokens"), " lowers this cost."),
  ];
}

function timelines(range, rows) {
  const heading = h("h2", {}, "Over time");
  if (!rows.some(({ requests }) => requests)) return [heading, empty("No requests", "There were no requests in this range.")];
  const words = scale(range, rows);
  const cost = {
    "complete answers": (row) => row.nanoEuro - row.interruptedNanoEuro,
    "interrupted answers": (row) => row.interruptedNanoEuro,
  };
  const requests = { answered, refused: (row) => row.refused, interrupted: (row) => row.interrupted };
  const tokens = { in: (row) => row.inputTokens, out: (row) => row.outputTokens };
  return [
    heading,
    bars("Cost", rows, cost, { ...words, show: money, classes: ["first", "third"] }),
    h("div", { class: "pair" }, bars("Requests", rows, requests, { ...words, classes: OUTCOMES }), bars("Tokens", rows, tokens, words)),
  ];
}

function breakdown(range, split, rows) {
  const by = split === "none" ? (range.by === "day" ? "UTC day" : "Hour") : GROUPS[split];
  const title = h("h2", {}, `By ${by === "UTC day" ? by : by.toLowerCase()}`);
  const lines = split === "none" ? rows.toReversed() : groupRows(rows, split);
  if (!lines.length) return [title, empty("No requests", "There were no requests in this range.")];
  const columns = {
    [by]: (row) => (split === "none" ? nameOf(range, row.start) : label(split, row[split])),
    Requests: (row) => count(row.requests),
    Interrupted: (row) => count(row.interrupted),
    Refused: (row) => count(row.refused),
    "Tokens in": (row) => count(row.inputTokens),
    "Tokens out": (row) => count(row.outputTokens),
    Cost: (row) => money(row.nanoEuro),
    "Cost of interrupted": (row) => money(row.interruptedNanoEuro),
  };
  return [
    title,
    table("Usage", columns, lines.slice(0, SHOWN)),
    lines.length > SHOWN &&
      h(
        "p",
        { class: "small quiet" },
        `Showing the first ${plural(SHOWN, "row")} of ${count(lines.length)}. The CSV file contains all.`,
      ),
  ];
}

// Returns one row per app or model, the most expensive first.
function groupRows(rows, split) {
  const groups = Map.groupBy(rows, (row) => row[split]);
  const sums = [...groups].map(([name, its]) => ({ [split]: name, ...addUp(its) }));
  return sums.sort((a, b) => b.nanoEuro - a.nanoEuro || b.requests - a.requests);
}

function label(split, name) {
  if (name === "*") return "Other apps";
  return name || (split === "model" ? "Unknown (refused early)" : "Unknown");
}

async function download(range, split, signal) {
  const text = await getText(usagePath(range, split), signal, "text/csv");
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  h("a", { href: address, download: `usage-by-${range.by}.csv` }).click();
  URL.revokeObjectURL(address);
}
