// Manages the account's webhook, and shows its deliveries.

import { h } from "/pages/dom.js";
import { capital, duration, moment } from "/pages/format.js";
import { call, get, getIfThere } from "./api.js";
import {
  action,
  announce,
  badge,
  card,
  choice,
  confirmed,
  empty,
  field,
  follow,
  form,
  heading,
  once,
  redraw,
  refusal,
  table,
} from "./parts.js";

export const title = "Notifications";

const EVENTS = [
  "deploy.succeeded",
  "deploy.failed",
  "app.crashed",
  "app.unhealthy",
  "app.recovered",
  "domain.expiring",
  "security.finding",
];
const OUTCOMES = ["delivered", "failed", "dropped"];
const TONES = { delivered: "good", failed: "bad" };
const PAGE = 50;

export async function draw(signal) {
  const receiver = h("div", { class: "view" });
  const log = new Log(signal);
  const [webhook, apps] = await Promise.all([
    getIfThere("/account/webhook", signal),
    get("/account/apps", signal),
    log.refresh(),
  ]);
  show(receiver, webhook);
  follow(1500, signal, () => log.refresh());
  return [
    heading("Notifications", "Your apps’ events reach one URL of yours, as signed JSON."),
    receiver,
    card("Deliveries", tester(), log.filters(apps), log.panel),
  ];
}

// -- the webhook -----------------------------------------------------------------------------------------------

function show(panel, webhook) {
  panel.replaceChildren(webhook ? present(panel, webhook) : setting(panel));
}

function present(panel, webhook) {
  const line = refusal();
  const change = () => {
    panel.replaceChildren(setting(panel, webhook));
    panel.querySelector("input").focus();
  };
  const clear = async (button) => {
    const loss = "The service stops sending events and deletes the signing secret. A new URL gets a new secret.";
    if (!(await confirmed("Clear the webhook?", loss, "Clear"))) return button.focus();
    await call("DELETE", "/account/webhook");
    show(panel, null);
    panel.querySelector("input").focus();
    announce("The webhook is cleared.");
  };
  const set = h("p", { class: "small quiet" }, "Set ", moment(webhook.createdAt), ".");
  const buttons = [
    h("button", { type: "button", onclick: change }, "Change"),
    action("Clear", { class: "danger" }, line, clear),
  ];
  return card(
    "Webhook",
    h(
      "div",
      { class: "row apart" },
      h("div", { class: "cut" }, h("code", {}, webhook.url), set),
      h("div", { class: "row" }, buttons),
    ),
    line,
  );
}

function setting(panel, before) {
  const url = h("input", {
    id: "url",
    type: "url",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "https://example.com/events",
    value: before?.url,
  });
  const save = async () => {
    const { secret, ...webhook } = await call("PUT", "/account/webhook", { body: { url: url.value.trim() } });
    show(panel, webhook);
    if (secret) panel.append(secretPanel(secret));
    else document.querySelector("main h1").focus();
    announce("The webhook is set.");
  };
  const cancel = () => {
    show(panel, before);
    panel.querySelector("button").focus();
  };
  const beside = before && h("button", { type: "button", onclick: cancel }, "Cancel");
  return card(
    "Webhook",
    !before && empty("No webhook is set", "Without a webhook, events are dropped."),
    form("with-button", field("URL", url), h("button", { class: "main" }, "Save"), save, beside),
    before && h("p", { class: "small quiet" }, "A new URL gets a new signing secret, and the current secret becomes invalid."),
  );
}

const secretPanel = (secret) =>
  once(
    "Your signing secret",
    "It is shown only once. Your receiver needs it to verify events, usually as SERVICE_WEBHOOK_SECRET.",
    secret,
  );

// -- deliveries -------------------------------------------------------------------------------------------------

function tester() {
  const type = choice("type", EVENTS);
  const send = async () => {
    await call("POST", "/account/webhook/test", { body: { type: type.value } });
    announce(`A sample of ${type.value} is on its way.`);
  };
  return form("with-button snug", field("Test event", type), h("button", {}, "Send"), send);
}

// The newest deliveries, refreshed, and as many older pages as were asked for.
class Log {
  constructor(signal) {
    this.signal = signal;
    this.panel = h("div", { class: "below" });
    this.chosen = {};
    this.rows = new Map(); // by attempt; a row never changes
    this.more = false;
  }

  filters(apps) {
    const select = (name, all, values) => {
      const change = ({ target }) => {
        this.chosen[name] = target.value;
        this.rows.clear();
        this.more = false;
        // The next refresh, seconds away, reports a failure.
        this.refresh().catch(() => {});
      };
      const options = values.map((value) => h("option", { value }, name === "outcome" ? capital(value) : value));
      return h("select", { "aria-label": all, onchange: change }, h("option", { value: "" }, all), options);
    };
    return h(
      "div",
      { class: "row" },
      select("type", "All events", EVENTS),
      apps.length > 1 && select("app", "All apps", apps.map(({ name }) => name)),
      select("outcome", "All outcomes", OUTCOMES),
    );
  }

  async load(before) {
    const chosen = { ...this.chosen };
    const query = new URLSearchParams({ limit: PAGE });
    for (const [name, value] of Object.entries({ ...chosen, before })) if (value) query.set(name, value);
    const page = await get(`/account/deliveries?${query}`, this.signal);
    if (JSON.stringify(chosen) !== JSON.stringify(this.chosen)) return; // another filter was chosen meanwhile
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
  if (!rows.length) return empty("Nothing was sent yet", "Every event appears here with its outcome, for 30 days.");
  const again = ({ id, type, at }) => {
    const named = { class: "plain", "data-focus": `${id} ${at}`, "aria-label": `Redeliver ${type} ${id}` };
    return action("Redeliver", named, line, async () => {
      await call("POST", `/account/deliveries/${encodeURIComponent(id)}/redeliver`);
      announce(`${type} is on its way again.`);
    });
  };
  const named = ({ attempt, type }) => ({
    href: `#/notifications/${attempt}`,
    "data-focus": attempt,
    "aria-label": `${type}, delivery ${attempt}`,
  });
  const columns = {
    Event: (row) => h("a", named(row), h("code", {}, row.type)),
    App: ({ app }) => app,
    Outcome: outcomeOf,
    Sent: ({ at }) => moment(at),
    Took: ({ durationMs }) => duration(durationMs),
    "": again,
  };
  return table("Deliveries", columns, rows);
}

export const outcomeOf = ({ outcome, status, error }) => [badge(capital(outcome), TONES[outcome]), reason(status, error)];

// The error "status" adds nothing to the status itself.
function reason(status, error) {
  const parts = [status && `status ${status}`, error !== "status" && error].filter(Boolean).join(", ");
  return parts && h("span", { class: "small quiet" }, ` ${parts}`);
}
