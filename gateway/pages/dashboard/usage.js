// Shows the usage and cost of the account's apps, by hour or day, and by app or model.

import { chart } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { count, money, plural } from "/pages/format.js";
import { getText } from "./api.js";
import { follow } from "./follow.js";
import { action, empty, facts, field, furtherRows, heading, redraw, refusal, run, table } from "./parts.js";
import {
  RANGES,
  addUp,
  answered,
  fetchUsage,
  fill,
  nameOf,
  openRequests,
  refused,
  requestSeries,
  seriesOf,
  startsOf,
  usagePath,
} from "./periods.js";
import { keepQuery, saveCsv } from "./query.js";

export const title = "Usage";

const GROUPS = { app: "App", model: "Model", none: "Time" };
const SHOWN = 20; // rows of the table at first, and with each further step

// With `app`, the view is about this app alone. The query keeps the range and the group.
export async function draw(signal, { app = "" }, query) {
  const range = select("range", Object.entries(RANGES).map(([value, { name }]) => [value, name]), query);
  const group = select("group", Object.entries(app ? { none: GROUPS.none } : GROUPS), query);
  const [figures, charts, list] = [1, 2, 3].map(() => h("section", { class: "card" }));
  const [line, stale] = [refusal(), refusal()]; // the second tells why the figures are not those of the choice
  let shown = SHOWN;
  const more = () => {
    shown += SHOWN;
    return refresh();
  };
  const refresh = async () => {
    const [chosen, split] = [range.value, group.value];
    const wanted = [fetchUsage(RANGES[chosen], split, signal, app), fetchUsage(RANGES.month, "none", signal, app)];
    const [rows, month] = await Promise.all(wanted);
    if (chosen !== range.value || split !== group.value) return; // the choice has changed
    stale.textContent = "";
    redraw(figures, [chosen, rows, month], () => summary(RANGES[chosen], addUp(rows), addUp(month)));
    redraw(charts, [chosen, fill(RANGES[chosen], rows)], ([, filled]) => timelines(RANGES[chosen], filled, app));
    redraw(list, [chosen, split, rows, shown], () => breakdown(RANGES[chosen], split, rows, shown, more));
  };
  const choose = () => {
    shown = SHOWN;
    keepQuery({ range: range.value, group: app ? "" : group.value });
    run(stale, refresh);
  };
  for (const choice of [range, group]) choice.addEventListener("change", choose);
  await follow(["usage"], signal, refresh);
  const csv = action("Download CSV", {}, line, () => download(RANGES[range.value], group.value, signal));
  return [
    heading("Usage", "Your apps’ requests and their cost. Hourly figures are kept for 14 days, daily figures for 400 days."),
    h("div", { class: "fields" }, field("Range", range), !app && field("Group by", group), !app && csv),
    line,
    stale,
    figures,
    charts,
    list,
  ];
}

const select = (id, options, query) =>
  h("select", { id }, options.map(([value, name]) => h("option", { value, selected: query.get(id) === value }, name)));

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
      Refused: count(refused(total)),
      Failed: count(total.failed),
      "Tokens in": count(total.inputTokens),
      "Tokens out": count(total.outputTokens),
    }),
    total.interrupted > 0 &&
      h("p", { class: "small quiet" }, explanation, h("code", {}, "maxTokens"), " lowers this cost."),
  ];
}

function timelines(range, rows, app) {
  const heading = h("h2", {}, "Over time");
  if (!rows.some(({ requests }) => requests)) return [heading, empty("No requests", "There were no requests in this range.")];
  const cost = seriesOf(rows, {
    "complete answers": ["good", (row) => row.nanoEuro - row.interruptedNanoEuro],
    "interrupted answers": ["busy", (row) => row.interruptedNanoEuro],
  });
  const tokens = seriesOf(rows, { in: ["soft", (row) => row.inputTokens], out: ["plain", (row) => row.outputTokens] });
  const [times, span, onpick] = [startsOf(rows), range.span, openRequests(app)];
  return [
    heading,
    chart("Cost", cost, times, { unit: "cost", show: money, span, onpick }),
    h(
      "div",
      { class: "pair" },
      chart("Requests", requestSeries(rows), times, { span, onpick }),
      chart("Tokens", tokens, times, { unit: "tokens", span, onpick }),
    ),
  ];
}

function breakdown(range, split, rows, shown, more) {
  const by = split === "none" ? (range.by === "day" ? "UTC day" : "Hour") : GROUPS[split];
  const title = h("h2", {}, `By ${by === "UTC day" ? by : by.toLowerCase()}`);
  const lines = split === "none" ? rows.toReversed() : groupRows(rows, split);
  if (!lines.length) return [title, empty("No requests", "There were no requests in this range.")];
  const columns = {
    [by]: (row) => (split === "none" ? nameOf(range, row.start) : label(split, row[split])),
    Requests: (row) => count(row.requests),
    Interrupted: (row) => count(row.interrupted),
    Refused: (row) => count(refused(row)),
    Failed: (row) => count(row.failed),
    "Tokens in": (row) => count(row.inputTokens),
    "Tokens out": (row) => count(row.outputTokens),
    Cost: (row) => money(row.nanoEuro),
    "Cost of interrupted": (row) => money(row.interruptedNanoEuro),
  };
  return [
    title,
    table("Usage", columns, lines.slice(0, shown), "compact usage"),
    lines.length > shown && furtherRows(shown, plural(lines.length, "row"), more),
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
  saveCsv(`usage-by-${range.by}.csv`, await getText(usagePath(range, split), signal, "text/csv"));
}
