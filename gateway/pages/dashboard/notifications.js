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
const TONES = { delivered: "good", failed: "bad" };

export async function draw(signal) {
  const [receiver, log] = [h("div", { class: "view" }), h("div", { class: "below" })];
  const refresh = async () => redraw(log, await get("/account/deliveries?limit=50", signal), deliveries);
  const [webhook] = await Promise.all([getIfThere("/account/webhook", signal), refresh()]);
  show(receiver, webhook);
  follow(1500, signal, refresh);
  return [
    heading("Notifications", "Your apps’ events reach one URL of yours, as signed JSON."),
    receiver,
    card("Deliveries", tester(), log),
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

function deliveries(rows) {
  if (!rows.length) return empty("Nothing was sent yet", "Every event appears here with its outcome, for 30 days.");
  const line = refusal();
  const again = ({ id, type, at }) => {
    const named = { class: "plain", "data-focus": `${id} ${at}`, "aria-label": `Redeliver ${type} ${id}` };
    return action("Redeliver", named, line, async () => {
      await call("POST", `/account/deliveries/${encodeURIComponent(id)}/redeliver`);
      announce(`${type} is on its way again.`);
    });
  };
  const columns = {
    Event: ({ type }) => h("code", {}, type),
    App: ({ app }) => app,
    Outcome: ({ outcome, status, error }) => [badge(capital(outcome), TONES[outcome]), reason(status, error)],
    Sent: ({ at }) => moment(at),
    Took: ({ durationMs }) => duration(durationMs),
    "": again,
  };
  return [table("Deliveries", columns, rows), line];
}

// The error "status" adds nothing to the status itself.
function reason(status, error) {
  const parts = [status && `status ${status}`, error !== "status" && error].filter(Boolean).join(", ");
  return parts && h("span", { class: "small quiet" }, ` ${parts}`);
}
