// The hours and days of an account's usage: which to fetch, and how to label them.

import { get } from "./api.js";

const HOUR = 3_600_000;
const DAY = 24 * HOUR;
const SIZES = { hour: HOUR, day: DAY };
const COUNTS = [
  "requests",
  "refused",
  "failed",
  "interrupted",
  "inputTokens",
  "outputTokens",
  "nanoEuro",
  "interruptedNanoEuro",
];

const formatter = (options) => new Intl.DateTimeFormat("en-GB", options);
const hour = formatter({ day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const day = formatter({ day: "numeric", month: "short", timeZone: "UTC" });

const ago = (days) => () => Date.now() - days * DAY;

function monthsAgo(months) {
  const now = new Date();
  return Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - months, 1);
}

// Days are UTC days, like those of the spending cap. Hours are in the viewer's time zone.
export const RANGES = {
  "24h": { name: "Last 24 hours", by: "hour", span: "24 hours", from: ago(1) },
  "7d": { name: "Last 7 days", by: "hour", span: "7 days", from: ago(7) },
  "30d": { name: "Last 30 days", by: "day", span: "30 days", from: ago(30) },
  month: { name: "This month", by: "day", span: "this month", from: () => monthsAgo(0) },
  before: { name: "Last month", by: "day", span: "last month", from: () => monthsAgo(1), to: () => monthsAgo(0) },
  "90d": { name: "Last 90 days", by: "day", span: "90 days", from: ago(90) },
  year: { name: "Last 12 months", by: "day", span: "12 months", from: ago(365) },
};

// `app` is the name of the only app to count, if there is one.
export function usagePath({ by, from, to = Date.now }, group, app) {
  const query = { from: new Date(from()).toISOString(), to: new Date(to()).toISOString(), by, group, ...(app && { app }) };
  return `/account/usage?${new URLSearchParams(query)}`;
}

export const fetchUsage = async (range, group, signal, app) => (await get(usagePath(range, group, app), signal)).rows;

export const answered = (row) => row.requests - row.refused - row.interrupted;

export const refused = (row) => row.refused - row.failed; // `refused` counts both

export function addUp(rows) {
  const total = Object.fromEntries(COUNTS.map((name) => [name, 0]));
  for (const row of rows) for (const name of COUNTS) total[name] += row[name];
  return total;
}

// Returns every hour or day of the range, oldest first, including those without requests.
export function fill({ by, from, to = Date.now }, rows) {
  const size = SIZES[by];
  const found = Map.groupBy(rows, ({ start }) => Date.parse(start));
  const filled = [];
  for (let at = Math.ceil(from() / size) * size; at < to(); at += size) {
    filled.push({ start: new Date(at).toISOString(), ...addUp(found.get(at) ?? []) });
  }
  return filled;
}

// What a chart shows of the rows that `fill` returned. `parts` maps names to [tone, function from a row to its value].
export const seriesOf = (rows, parts) =>
  Object.entries(parts).map(([name, [tone, of]]) => ({ name, tone, values: rows.map(of) }));

export const startsOf = (rows) => rows.map(({ start }) => Date.parse(start));

export const requestSeries = (rows) =>
  seriesOf(rows, {
    answered: ["good", answered],
    refused: ["warn", refused],
    failed: ["bad", (row) => row.failed],
    interrupted: ["busy", (row) => row.interrupted],
  });

// Returns what a chart calls to open the requests of an hour or a day, of all apps or of one.
export const openRequests = (app) => (from, to) => {
  const query = new URLSearchParams({ from: new Date(from).toISOString(), to: new Date(to).toISOString() });
  location.hash = app ? `#/apps/${app}/requests?${query}` : `#/requests?${query}`;
};

export const nameOf = ({ by }, start) => (by === "day" ? day : hour).format(Date.parse(start));
