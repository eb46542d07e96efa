// Shows the account's webhook and the log of its deliveries.

import { h } from "/pages/dom.js";
import { capital, duration, exact, moment, plural } from "/pages/format.js";
import { call, get, getIfThere } from "./api.js";
import { searchable } from "./app_search.js";
import { follow } from "./follow.js";
import {
  action,
  announce,
  badge,
  card,
  choice,
  confirmAction,
  empty,
  field,
  form,
  heading,
  redraw,
  refusal,
  run,
  table,
} from "./parts.js";
import { keepQuery } from "./query.js";
import { may } from "./session.js";
import { webhookPanel } from "./webhook.js";

export const title = "Webhooks";

const FILTERS = ["type", "app", "outcome"];
const OUTCOMES = ["delivered", "failed", "dropped"];
const TONES = { delivered: "good", failed: "bad" };
const PAGE = 30;
const LOGGED = 1000; // rows of the whole log

// The query holds the filters of the deliveries.
export async function draw(signal, _groups, query) {
  const log = new Log(signal, query);
  const [webhook, apps, { eventTypes }] = await Promise.all([
    getIfThere("/account/webhook", signal),
    get("/account/apps", signal),
    get("/capabilities", signal),
    follow(["deliveries"], signal, log.refresh),
  ]);
  const [test, again] = [tester(eventTypes), redeliverer(log)];
  // Without a webhook, events are dropped.
  const changed = (webhook) => (test.hidden = again.hidden = !webhook);
  return [
    heading(title, "The service sends your apps’ events to your URL as signed JSON."),
    webhookPanel(webhook, changed),
    card("Deliveries", h("div", { class: "pair" }, may("test_webhook") && test, may("redeliver_failed") && again), log.filters(eventTypes, apps), log.stale, log.panel),
  ];
}

// -- deliveries -------------------------------------------------------------------------------------------------

function tester(eventTypes) {
  const type = choice("type", eventTypes);
  const send = async () => {
    await call("POST", "/account/webhook/test", { body: { type: type.value } });
    announce(`Queued a sample of ${type.value}.`);
  };
  return form("with-button snug", field("Test event", type), h("button", {}, "Send"), send);
}

// Sends all events again that happened since a time and whose newest delivery failed.
function redeliverer(log) {
  const since = h("input", { id: "since", type: "datetime-local", required: true, value: localTime(Date.now() - 3_600_000) });
  const result = h("p", { class: "small quiet", role: "status" });
  const send = async (button) => {
    result.textContent = "";
    const from = new Date(since.value).toISOString();
    const failed = await countFailed(from);
    if (!failed) {
      result.textContent = "No event has failed since then.";
      return;
    }
    const text = "The events keep their ids and get new timestamps and signatures. You can do this once per minute.";
    const options = { keep: "Cancel", tone: "main" };
    const title = `Redeliver ${plural(failed, "event")}?`;
    if (!(await confirmAction(title, text, "Redeliver", options))) return button.focus();
    const { count } = await call("POST", "/account/deliveries/redeliver", { body: { since: from, outcome: "failed" } });
    result.textContent = `${plural(count, "event is", "events are")} queued again.`;
    await log.refresh();
  };
  const button = h("button", {}, "Redeliver all …");
  const fields = form("with-button", field("Failed events since", since), button, () => send(button));
  return h("div", { class: "stack" }, fields, result);
}

// The rows are newest first. The newest delivery of an event decides, as in the service.
async function countFailed(from) {
  const newest = new Map();
  for (const row of await get(`/account/deliveries?limit=${LOGGED}`)) if (!newest.has(row.id)) newest.set(row.id, row);
  const failed = ({ outcome, eventAt }) => outcome === "failed" && Date.parse(eventAt) >= Date.parse(from);
  return [...newest.values()].filter(failed).length;
}

// Formats a time for an input of type datetime-local.
function localTime(milliseconds) {
  const offset = new Date(milliseconds).getTimezoneOffset() * 60_000;
  return new Date(milliseconds - offset).toISOString().slice(0, 16);
}

// The newest deliveries, which are refreshed, and the older pages that the user opened.
class Log {
  constructor(signal, query) {
    this.signal = signal;
    this.stale = refusal(); // tells why the rows are not those of the choice
    this.panel = h("div", { class: "below" });
    this.chosen = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""]));
    this.rows = new Map(); // by attempt; a row never changes
    this.more = false;
  }

  filters(eventTypes, apps) {
    const select = (name, all, values) => {
      const change = ({ target }) => {
        this.chosen[name] = target.value;
        keepQuery(this.chosen);
        this.rows.clear();
        this.more = false;
        run(this.stale, this.refresh);
      };
      const options = values.map((value) => h("option", { value }, name === "outcome" ? capital(value) : value));
      const list = h("select", { "aria-label": all, onchange: change }, h("option", { value: "" }, all), options);
      list.value = this.chosen[name];
      return name === "app" ? searchable(list) : list;
    };
    return h(
      "div",
      { class: "row" },
      select("type", "All events", eventTypes),
      apps.length > 1 && select("app", "All apps", apps.map(({ name }) => name)),
      select("outcome", "All outcomes", OUTCOMES),
    );
  }

  async load(before) {
    const chosen = { ...this.chosen };
    const query = new URLSearchParams({ limit: PAGE });
    for (const [name, value] of Object.entries({ ...chosen, before })) if (value) query.set(name, value);
    const page = await get(`/account/deliveries?${query}`, this.signal);
    if (JSON.stringify(chosen) !== JSON.stringify(this.chosen)) return; // the filter has changed
    this.stale.textContent = "";
    if (before || !this.rows.size) this.more = page.length === PAGE;
    for (const row of page) this.rows.set(row.attempt, row);
    const rows = [...this.rows.values()].sort((a, b) => compare(b.attempt, a.attempt));
    redraw(this.panel, { rows, more: this.more, chosen }, (data) => this.draw(data));
  }

  refresh = () => this.load();

  draw({ rows, more, chosen }) {
    const line = refusal();
    const older = () => this.load(rows.at(-1).attempt);
    const button = more && action("Older", { "data-focus": "older" }, line, older);
    return [deliveries(rows, Object.values(chosen).some(Boolean), line), button, line];
  }
}

// Attempts are `<milliseconds>-<number>`.
function compare(a, b) {
  const [[x, m], [y, n]] = [a.split("-").map(Number), b.split("-").map(Number)];
  return x - y || m - n;
}

function deliveries(rows, filtered, line) {
  if (!rows.length && filtered) return empty("No such deliveries", "Choose other events, apps or outcomes.");
  const kept = "Each event appears here with its outcome. The last 1,000 deliveries are kept for up to 30 days.";
  if (!rows.length) return empty("No deliveries yet", kept);
  const again = ({ id, type, at }) => {
    const named = { class: "plain", "data-focus": `${id} ${at}`, "aria-label": `Redeliver ${type} ${id}` };
    return action("Redeliver", named, line, async () => {
      await call("POST", `/account/deliveries/${encodeURIComponent(id)}/redeliver`);
      announce(`Queued ${type} again.`);
    });
  };
  const named = ({ attempt, type, app, at }) => ({
    href: `#/webhooks/${attempt}`,
    "data-focus": attempt,
    "aria-label": `${type} of ${app}, sent ${exact(at)}`,
  });
  const columns = {
    Event: (row) => [
      h("a", named(row), h("code", {}, row.type)),
      h("div", { class: "small quiet whole" }, row.id),
      h("div", { class: "small quiet" }, notesOn(row)),
    ],
    App: ({ app }) => app,
    Address: ({ url }) => addressOf(url),
    Outcome: (row) => [outcomeOf(row), row.outcome !== "dropped" && h("span", { class: "small quiet" }, ` in ${duration(row.durationMs)}`)],
    Sent: ({ at }) => moment(at),
    ...(may("redeliver") && { "": again }),
  };
  return table("Deliveries", columns, rows, "compact deliveries");
}

export const notesOn = ({ sample, redelivery }) =>
  [sample && "Sample", redelivery > 0 && `Redelivery ${redelivery}`].filter(Boolean).join(", ");

function addressOf(url) {
  if (!url) return "–";
  const text = url.replace(/^https?:\/\//, "");
  return h("span", { class: "small", title: url }, text.length > 28 ? `${text.slice(0, 27)}…` : text);
}

export const outcomeOf = ({ outcome, status, error }) => [badge(capital(outcome), TONES[outcome]), reason(status, error)];

// The error "status" adds nothing to the status itself.
function reason(status, error) {
  const parts = [status && `status ${status}`, error !== "status" && error].filter(Boolean).join(", ");
  return parts && h("span", { class: "small quiet" }, ` ${parts}`);
}
