// Lists the latest requests to the account's apps. A row opens the request's details.

import { chart } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { count, duration, money } from "/pages/format.js";
import { KINDS, kindOf } from "/pages/outcomes.js";
import { get } from "./api.js";
import { follow } from "./follow.js";
import { action, badge, card, empty, facts, field, heading, offer, redraw, refusal, run, table } from "./parts.js";
import { keepQuery, saveCsv } from "./query.js";
import { openRequest } from "./request.js";

export const title = "Requests";

const PAGE = 20; // rows
const BATCH = 200; // rows fetched together
const PERCENTILES = [50, 95, 99];
const OUTCOMES = { answered: "Answered", interrupted: "Interrupted", refused: "Refused" };
const FILTERS = ["app", "model", "outcome", "code", "from", "to"];
const BARS = 60; // at most
const SIZES = [1, 5, 15, 60, 360, 1440].map((minutes) => minutes * 60_000);
const COLUMNS = "id at app model status code reason inputTokens outputTokens nanoEuro ttftMs durationMs".split(" ");

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

// With `app`, the view is about this app alone. The query holds the filters, and with `id` opens this request.
export async function draw(signal, { app = "" }, query) {
  const inputs = makeFilters(app, query);
  const live = h("input", { type: "checkbox", id: "live", checked: true });
  const [graph, summary, list] = [1, 2, 3].map(() => h("div", { class: "stack" }));
  const [line, stale] = [refusal(), refusal()]; // the second tells why the rows are not those of the choice
  let [rows, shown, complete] = [[], PAGE, false];

  const chosen = () => ({
    ...Object.fromEntries(Object.entries(inputs).map(([name, { value }]) => [name, value])),
    from: toIso(inputs.from.value),
    to: toIso(inputs.to.value),
  });
  // Resolves with null if the choice has changed meanwhile.
  const fetchRows = async (more = {}) => {
    const asked = chosen();
    const filters = Object.entries({ ...asked, ...(app && { app }), limit: BATCH, ...more });
    const found = await get(`/account/requests?${new URLSearchParams(filters.filter(([, value]) => value))}`, signal);
    return JSON.stringify(asked) === JSON.stringify(chosen()) ? found : null;
  };
  const show = () => {
    offer(inputs.app, rows.map((row) => row.app));
    offer(inputs.model, rows.map((row) => row.model));
    offer(inputs.code, rows.map((row) => row.code));
    redraw(graph, rows, () => histogram(rows, chosen(), (from, to) => choose({ from, to })));
    redraw(summary, rows, () => [percentiles(rows), codes(rows, (code) => choose({ code }))]);
    redraw(list, [rows.slice(0, shown), rows.length, complete], () => [
      requestTable(rows.slice(0, shown), app, Object.values(chosen()).some(Boolean)),
      (rows.length > shown || !complete) && action("Load older", { "data-focus": "older" }, line, loadOlder),
    ]);
  };
  const loadOlder = async () => {
    if (rows.length < shown + PAGE && !complete) {
      const older = await fetchRows({ before: rows.at(-1)?.id });
      if (!older) return;
      rows = [...rows, ...older];
      complete = older.length < BATCH;
    }
    shown += PAGE;
    show();
  };
  // Keeps older rows that were loaded, unless so much is new that there would be a gap.
  const load = async () => {
    const newest = await fetchRows();
    if (!newest) return;
    const known = rows.findIndex(({ id }) => id === newest.at(-1)?.id);
    if (known < 0) complete = newest.length < BATCH;
    rows = known < 0 ? newest : [...newest, ...rows.slice(known + 1)];
    stale.textContent = "";
    show();
  };
  const refresh = async () => live.checked && (await load());
  const restart = () => {
    keepQuery(chosen());
    [rows, shown] = [[], PAGE]; // the page shows the rows of the choice before until there are others
    return run(stale, load);
  };
  const choose = ({ from, to, code }) => {
    if (from) [inputs.from.value, inputs.to.value] = [toLocal(from), toLocal(to)];
    if (code) offer(inputs.code, [code]), (inputs.code.value = code);
    restart();
  };
  for (const input of Object.values(inputs)) input.addEventListener("change", restart);
  live.addEventListener("change", () => run(stale, refresh));
  let opening = false; // a second click would open a second sheet
  const open = async (id) => {
    if (opening) return;
    opening = true;
    await run(line, () => openRequest(id, signal));
    opening = false;
  };
  list.addEventListener("click", ({ target }) => {
    const row = target.closest("tbody tr");
    if (row) open(row.querySelector("button").dataset.focus);
  });

  await follow(["requests"], signal, refresh);
  if (query.get("id")) queueMicrotask(() => open(query.get("id")));
  const csv = action("Download CSV", {}, line, () => saveCsv("requests.csv", toCsv(rows.slice(0, shown))));
  const clear = action("Clear filters", {}, line, () => {
    for (const input of Object.values(inputs)) input.value = "";
    return restart();
  });
  const buttons = h("div", { class: "row" }, h("label", { class: "check" }, live, "Live"), clear, csv);
  return [
    heading("Requests", "The last 1,000 requests to your apps. Contents and users are not recorded."),
    h("div", { class: "fields asked" }, filterFields(inputs, app)),
    h("div", { class: "row apart" }, searchForm(open), buttons),
    line,
    stale,
    card("Over time", graph, summary),
    card("Newest first", list),
  ];
}

// -- filters ----------------------------------------------------------------------------------------------------

function makeFilters(app, query) {
  const select = (id, all) => h("select", { id }, h("option", { value: "" }, all));
  const inputs = {
    app: select("app", "All apps"),
    model: select("model", "All models"),
    outcome: select("outcome", "All outcomes"),
    code: select("code", "All codes"),
    from: h("input", { id: "from", type: "datetime-local" }),
    to: h("input", { id: "to", type: "datetime-local" }),
  };
  inputs.outcome.append(...Object.entries(OUTCOMES).map(([value, name]) => h("option", { value }, name)));
  for (const name of FILTERS.slice(0, 4)) {
    if (name !== "outcome") offer(inputs[name], [query.get(name)]);
    inputs[name].value = query.get(name) ?? "";
  }
  if (app) inputs.app.value = "";
  for (const name of FILTERS.slice(4)) inputs[name].value = toLocal(Date.parse(query.get(name)));
  return inputs;
}

const filterFields = (inputs, app) =>
  Object.entries(inputs).map(
    ([name, input]) => !(app && name === "app") && field(name === "code" ? "Code" : name[0].toUpperCase() + name.slice(1), input),
  );

function searchForm(open) {
  const id = h("input", { id: "request-id", autocomplete: "off", spellcheck: "false", placeholder: "X-Request-Id", required: true });
  const button = h("button", { class: "plain" }, "Find");
  const find = (event) => {
    event.preventDefault();
    open(id.value.trim());
  };
  return h("form", { class: "row find", onsubmit: find }, h("label", { for: "request-id" }, "Request id"), id, button);
}

// Inputs of type datetime-local are in the viewer's time zone, without seconds.
function toLocal(time) {
  if (Number.isNaN(time)) return "";
  return new Date(time - new Date(time).getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

const toIso = (local) => local && new Date(local).toISOString();

// -- figures ----------------------------------------------------------------------------------------------------

function histogram(rows, { from, to }, onpick) {
  if (!rows.length) return null;
  const end = to ? Date.parse(to) : Date.now();
  const begin = from ? Date.parse(from) : Date.parse(rows.at(-1).at);
  const size = SIZES.find((each) => (end - begin) / each < BARS) ?? SIZES.at(-1);
  const first = Math.floor(begin / size) * size;
  const length = Math.max(Math.ceil((end - first) / size), 12);
  const times = Array.from({ length }, (_, n) => first + (n - length + Math.ceil((end - first) / size)) * size);
  const series = Object.entries(KINDS).map(([kind, [name, tone]]) => ({ kind, name, tone, values: times.map(() => 0) }));
  for (const { at, code } of rows) {
    const n = Math.floor((Date.parse(at) - times[0]) / size);
    if (n >= 0 && n < length) series.find(({ kind }) => kind === kindOf(code)).values[n] += 1;
  }
  const used = series.filter(({ kind, values }) => kind === "answered" || values.some(Boolean));
  return chart("Requests", used, times, { span: "the rows below", onpick });
}

function percentiles(rows) {
  const times = {
    "First token": rows.filter(({ ttftMs }) => ttftMs !== null).map(({ ttftMs }) => ttftMs),
    "Full answer": rows.filter(({ code }) => !code).map(({ durationMs }) => durationMs),
  };
  const words = (its) => its.length > 0 && PERCENTILES.map((p) => `p${p} ${duration(rank(its, p))}`).join(" · ");
  return facts(Object.fromEntries(Object.entries(times).map(([name, its]) => [name, words(its)])));
}

// Returns the nearest rank: the smallest time that p percent of the times do not exceed.
const rank = (times, p) => times.toSorted((a, b) => a - b)[Math.ceil((p / 100) * times.length) - 1];

function codes(rows, choose) {
  const found = [...Map.groupBy(rows.filter(({ code }) => code), ({ code }) => code)].sort(([, a], [, b]) => b.length - a.length);
  const button = ([code, its]) => h("button", { type: "button", class: "plain", onclick: () => choose(code) }, h("code", {}, code), count(its.length));
  return found.length > 0 && h("div", { class: "codes", role: "group", "aria-label": "Errors by code" }, found.map(button));
}

// -- rows -------------------------------------------------------------------------------------------------------

function requestTable(rows, app, filtered) {
  if (!rows.length && filtered) return empty("No such requests", "None of the last 1,000 requests matches these filters.");
  if (!rows.length) return empty("No requests yet", "Requests to your apps appear here a few seconds after they end.");
  const columns = {
    Time: ({ at, id }) => h("button", { type: "button", "data-focus": id }, h("time", { datetime: at }, timeOf(Date.parse(at)))),
    App: ({ app }) => app,
    Model: ({ model }) => model || "–",
    Outcome: ({ status, code }) => badge(code ? [status || "", code].join(" ") : "Answered", KINDS[kindOf(code)][1]),
    Tokens: tokens,
    Cost: ({ nanoEuro }) => money(nanoEuro),
    "First token": ({ ttftMs }) => duration(ttftMs),
    Took: ({ durationMs }) => duration(durationMs),
  };
  return table("Requests", columns, rows, app ? "requests single" : "requests");
}

function tokens({ inputTokens, outputTokens, nanoEuro }) {
  if (inputTokens || outputTokens) return `${count(inputTokens)} in, ${count(outputTokens)} out`;
  return nanoEuro ? "Not reported" : "–";
}

// The date is left out for today's requests.
function timeOf(time) {
  const [day, today] = [date.format(time), date.format(Date.now())];
  return day === today ? clock.format(time) : `${day}, ${clock.format(time)}`;
}

// No value begins with a character that starts a formula in a spreadsheet.
function toCsv(rows) {
  const cell = (value) => `"${String(value ?? "").replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  return [COLUMNS, ...rows.map((row) => COLUMNS.map((name) => row[name]))].map((cells) => `${cells.map(cell).join(",")}\r\n`).join("");
}
