// Lists the latest requests to the account's apps. A row opens the request's details.

import { chart } from "/pages/chart.js";
import { h } from "/pages/dom.js";
import { count, duration, money, plural } from "/pages/format.js";
import { KINDS, kindOf, outcomeSeries } from "/pages/outcomes.js";
import { get, getText } from "./api.js";
import { searchable } from "./app_search.js";
import { follow } from "./follow.js";
import { action, badge, card, empty, facts, field, heading, offer, redraw, refusal, run, table } from "./parts.js";
import { keepQuery, saveCsv } from "./query.js";
import { openRequest } from "./request.js";

export const title = "Requests";

const PAGE = 20; // rows
const BATCH = 200; // rows fetched together
const OUTCOMES = { answered: "Answered", interrupted: "Interrupted", refused: "Refused" };
const FILTERS = ["app", "model", "outcome", "code", "from", "to"];

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

// With `app`, the view is about this app alone. The query holds the filters, and with `id` opens this request.
export async function draw(signal, { app = "" }, query) {
  const inputs = makeFilters(app, query);
  const live = h("input", { type: "checkbox", id: "live", checked: true });
  const [graph, summary, list] = [1, 2, 3].map(() => h("div", { class: "stack" }));
  const [line, stale] = [refusal(), refusal()]; // the second tells why the rows are not those of the choice
  let [rows, shown, figures] = [[], PAGE, null];

  const chosen = () => ({
    ...Object.fromEntries(Object.entries(inputs).map(([name, { value }]) => [name, value])),
    from: toIso(inputs.from.value),
    to: toIso(inputs.to.value),
  });
  const addressOf = (path, more = {}) => {
    const filters = Object.entries({ ...chosen(), ...(app && { app }), ...more }).filter(([, value]) => value);
    return `/account/requests${path}?${new URLSearchParams(filters)}`;
  };
  // Resolves with null if the choice has changed meanwhile.
  const ifChosenStill = async (fetching) => {
    const asked = JSON.stringify(chosen());
    const found = await fetching;
    return asked === JSON.stringify(chosen()) ? found : null;
  };
  const fetchRows = (more = {}) => get(addressOf("", { limit: BATCH, ...more }), signal);
  const show = () => {
    const { matching, logged, values } = figures;
    offer(inputs.app, values.apps);
    offer(inputs.model, values.models);
    offer(inputs.code, values.codes);
    const some = rows.slice(0, shown);
    redraw(graph, figures.bars, (bars) => bars.length > 0 && histogram(bars, (from, to) => choose({ from, to })));
    redraw(summary, figures, () => [percentiles(figures), codes(figures.codes, (code) => choose({ code }))]);
    redraw(list, [some, matching, logged], () => [
      requestTable(some, app, Object.values(chosen()).some(Boolean) && logged),
      some.length > 0 && h("div", { class: "row" }, h("span", { class: "small quiet" }, extent(some.length, figures)), matching > some.length && action("Load older", { "data-focus": "older" }, line, loadOlder)),
    ]);
  };
  const loadOlder = async () => {
    if (rows.length < shown + PAGE && rows.length < figures.matching) {
      const older = await ifChosenStill(fetchRows({ before: rows.at(-1)?.id }));
      if (!older) return;
      rows = [...rows, ...older];
    }
    shown += PAGE;
    show();
  };
  // Keeps older rows that were loaded, unless so much is new that there would be a gap.
  const load = async () => {
    const fetched = await ifChosenStill(Promise.all([fetchRows(), get(addressOf("/figures"), signal)]));
    if (!fetched) return;
    const [newest] = fetched;
    figures = fetched[1];
    const known = rows.findIndex(({ id }) => id === newest.at(-1)?.id);
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
  if (!app) offer(inputs.app, (await get("/account/apps", signal)).map(({ name }) => name));
  if (query.get("id")) queueMicrotask(() => open(query.get("id")));
  const csv = action("Download CSV", {}, line, async () => saveCsv("requests.csv", await getText(addressOf(""), signal, "text/csv")));
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
    app: searchable(select("app", "All apps")),
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

const histogram = (bars, onpick) =>
  chart("Requests", outcomeSeries(bars), bars.map(({ start }) => Date.parse(start)), { span: "the log", onpick });

function percentiles({ firstTokenMs, answerMs }) {
  const words = (times) => times && Object.entries(times).map(([name, time]) => `${name} ${duration(time)}`).join(" · ");
  return facts({ "First token": words(firstTokenMs), "Full answer": words(answerMs) });
}

function codes(found, choose) {
  const button = ([code, often]) => h("button", { type: "button", class: "plain", onclick: () => choose(code) }, h("code", {}, code), count(often));
  const buttons = Object.entries(found).map(button);
  return buttons.length > 0 && h("div", { class: "codes", role: "group", "aria-label": "Errors by code" }, buttons);
}

// -- rows -------------------------------------------------------------------------------------------------------

// Says which part of the log the rows are.
function extent(shown, { matching, logged }) {
  const all = matching < logged ? `${plural(matching, "request")} that match, of ${count(logged)} in the log` : plural(logged, "request");
  return `${count(shown)} of ${all}`;
}

function requestTable(rows, app, logged) {
  if (!rows.length && logged) return empty("No such requests", `None of the last ${plural(logged, "request")} matches these filters.`);
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
