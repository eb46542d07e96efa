// What all accounts, or one of them, spent on any dates: by month or day, and by account, app, model or provider.

import { chart } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { capital, count, money } from "/pages/format.js";
import { get, getText } from "/dashboard/api.js";
import { action, card, empty, heading, note, refusal } from "/dashboard/parts.js";
import { saveCsv } from "/dashboard/query.js";
import { choiceFilter, filters, shortList, textFilter } from "./lists.js";

export const title = "Spending";

const DAY = 86_400_000;
const PERIODS = { "": "Month", day: "Day" };
const ALL = { "": "Account", model: "Model", provider: "Provider", none: "Nothing" };
const ONE = { "": "App", model: "Model", provider: "Provider", none: "Nothing" };
const OTHERS = { account: "Deleted accounts", app: "Unknown", model: "Unknown (refused early)", provider: "Unknown" };

const month = new Intl.DateTimeFormat("en-GB", { month: "long", year: "numeric", timeZone: "UTC" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" });
const toDate = (time) => new Date(time).toISOString().slice(0, 10);

export async function draw(signal, _, query) {
  const account = query.get("account-id") ?? "";
  const by = query.get("by") in PERIODS ? query.get("by") : "month";
  const group = query.get("group") || (account ? "app" : "account");
  const [from, to] = datesOf(query, by);
  const asked = new URLSearchParams({ from, to: toDate(Date.parse(to) + DAY), by, group }); // the service excludes the end
  const address = account ? `/platform/accounts/${encodeURIComponent(account)}/usage?${asked}` : `/platform/spend?${asked}`;
  const { rows } = await get(address, signal);
  const line = refusal();
  const csv = action("Download CSV", {}, line, async () => saveCsv(`spending-by-${by}.csv`, await getText(address, signal, "text/csv")));
  const controls = {
    From: h("input", { id: "from", type: "date", value: from }),
    To: h("input", { id: "to", type: "date", value: to }),
    Period: choiceFilter("by", PERIODS, query),
    "Split by": choiceFilter("group", account ? ONE : ALL, query),
    "Account id": textFilter("account-id", query, { placeholder: "All accounts" }),
  };
  const lead = account ? ["Of the account ", h("a", { href: `#/accounts/${account}` }, account), "."] : "Of all accounts.";
  return [
    heading(title, [lead, " UTC days, kept for 400 days."], h("div", { class: "row" }, csv)),
    filters("spending", "Show", controls, query),
    line,
    card("Total", ...report(rows, { by, group, from, to }, query)),
  ];
}

// By month, the default is the last twelve months; by day, the last 31 days.
function datesOf(query, by) {
  const now = new Date();
  const first = by === "day" ? Date.now() - 30 * DAY : Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - 11, 1);
  const date = (name, otherwise) => (Number.isNaN(Date.parse(query.get(name))) ? toDate(otherwise) : query.get(name));
  return [date("from", first), date("to", Date.now())];
}

function report(rows, { by, group, from, to }, query) {
  if (!rows.length) return [empty("No spending", "Nobody spent anything on these dates.")];
  const sorted = rows.toSorted((a, b) => b.start.localeCompare(a.start) || b.nanoEuro - a.nanoEuro);
  const time = ({ start }) => (by === "day" ? day : month).format(Date.parse(start));
  const name = (row) => row.accountName || row[group] || OTHERS[group];
  const named = (row) => (row.account ? [h("a", { href: `#/accounts/${row.account}` }, name(row)), note(row.account)] : name(row));
  const split = group !== "none" && { [capital(group)]: named };
  const counts = {
    Requests: ({ requests }) => count(requests),
    "Tokens in": ({ inputTokens }) => count(inputTokens),
    "Tokens out": ({ outputTokens }) => count(outputTokens),
  };
  const columns = { [by === "day" ? "UTC day" : "Month"]: time, ...split, ...(group !== "account" && counts), Spent: ({ nanoEuro }) => money(nanoEuro) };
  const total = rows.reduce((sum, { nanoEuro }) => sum + nanoEuro, 0);
  const text = (row) => `${time(row)} ${name(row)} ${row.account ?? ""}`;
  const rest = { id: "search", filter: "Filter the rows", label: "Spending", one: "row" };
  return [
    h("p", { class: "figure" }, money(total)),
    by === "day" && timeline(rows, from, to),
    shortList({ rows: sorted, text, columns, ...rest }, query),
  ];
}

function timeline(rows, from, to) {
  const sums = new Map();
  for (const { start, nanoEuro } of rows) sums.set(Date.parse(start), (sums.get(Date.parse(start)) ?? 0) + nanoEuro);
  const times = [];
  for (let at = Date.parse(from); at <= Date.parse(to); at += DAY) times.push(at);
  const spent = [{ name: "spent", tone: "plain", values: times.map((at) => sums.get(at) ?? 0) }];
  return times.length > 1 && chart("Spending by day", spent, times, { unit: "spending", show: money });
}
