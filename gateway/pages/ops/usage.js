// What an account or one of its apps used: by hour, by app, by model and by error code.

import { chart } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { count, money } from "/pages/format.js";
import { get } from "/dashboard/api.js";
import { table } from "/dashboard/parts.js";
import { fill, requestSeries, startsOf } from "/dashboard/periods.js";
import { kindOf } from "/pages/outcomes.js";

const HOUR = 3_600_000;
const PERIODS = { "24h": ["24 hours", 24], "7d": ["7 days", 168] };
const SHOWN = 8; // rows of a table
const LOGGED = 1000; // requests that the service keeps

export const chosenPeriod = (query) => (query.get("period") in PERIODS ? query.get("period") : "24h");

// Links to each period of the view at `href`. `periods` maps the names in the address to lists that begin with a text.
export const periodLinks = (href, periods, chosen) =>
  Object.entries(periods).map(([name, [text]]) =>
    h("a", { href: `${href}?period=${name}`, "aria-current": name === chosen ? "true" : null }, text),
  );

// `at` is the address of the account. With `app`, only this app counts.
export async function fetchUsage(at, period, signal, app) {
  const hours = PERIODS[period][1];
  const first = Math.floor(Date.now() / HOUR) * HOUR - (hours - 1) * HOUR;
  const only = app ? { app } : {};
  const read = (group) => {
    const query = new URLSearchParams({ from: new Date(first).toISOString(), by: "hour", group, ...only });
    return get(`${at}/usage?${query}`, signal).then(({ rows }) => rows);
  };
  const logged = get(`${at}/requests/figures?${new URLSearchParams({ from: new Date(first).toISOString(), ...only })}`, signal);
  const [apps, models, figures] = await Promise.all([read("app"), read("model"), logged]);
  const rows = fill({ by: "hour", from: () => first, to: () => first + hours * HOUR }, apps);
  return { rows, apps, models, figures };
}

// `view` is the address of this page, and `known` are the apps that have a page.
export function showUsage(view, period, { rows, apps, models, figures }, known = []) {
  const [span] = PERIODS[period];
  const times = startsOf(rows);
  const cost = [{ name: "spent", tone: "plain", values: rows.map(({ nanoEuro }) => nanoEuro) }];
  const link = (name) => {
    const app = known.find((each) => each.name === name);
    return app ? h("a", { href: `#/apps/${app.id}` }, name) : name || "unknown";
  };
  return h(
    "section",
    { class: "card usage", "aria-labelledby": "usage-title" },
    h(
      "div",
      { class: "row apart" },
      h("h2", { id: "usage-title" }, `Usage, ${span}`),
      h("nav", { class: "periods", "aria-label": "Period" }, periodLinks(view, PERIODS, period)),
    ),
    h(
      "div",
      { class: "pair" },
      h("div", {}, chart("Cost by hour", cost, times, { unit: "spending", show: money, span })),
      h("div", {}, chart("Requests by hour", requestSeries(rows), times, { span })),
    ),
    h(
      "div",
      { class: "pair" },
      known.length > 0 && breakdown("App", "app", apps, link),
      breakdown("Model", "model", models, (name) => name || "none"),
      codes(figures),
    ),
  );
}

function breakdown(title, field, rows, show) {
  const sums = new Map();
  for (const row of rows) {
    const sum = sums.get(row[field]) ?? { name: row[field], requests: 0, nanoEuro: 0 };
    sum.requests += row.requests;
    sum.nanoEuro += row.nanoEuro;
    sums.set(row[field], sum);
  }
  const sorted = [...sums.values()].sort((a, b) => b.nanoEuro - a.nanoEuro || b.requests - a.requests);
  if (!sorted.length) return h("p", { class: "empty" }, "No requests in this period.");
  const columns = {
    [title]: ({ name }) => show(name),
    Requests: ({ requests }) => count(requests),
    Cost: ({ nanoEuro }) => money(nanoEuro),
  };
  return h("div", {}, table(`Usage by ${field}`, columns, sorted.slice(0, SHOWN)));
}

function codes({ matching, logged, codes: often }) {
  if (!matching) return false;
  const answered = matching - Object.values(often).reduce((sum, number) => sum + number, 0);
  const sorted = [["", answered], ...Object.entries(often)].filter(([, number]) => number).sort(([, a], [, b]) => b - a).slice(0, SHOWN);
  const columns = {
    Outcome: ([code]) => (code ? h("code", { class: kindOf(code) === "failed" ? "bad" : null }, code) : "Answered"),
    Requests: ([, number]) => count(number),
  };
  const short = logged === LOGGED && h("p", { class: "small quiet" }, "Of the last 1,000 requests.");
  return h("div", {}, table("Requests by code", columns, sorted), short);
}
