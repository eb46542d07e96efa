// Where the account's events go, and how that went.

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
    heading("Notifications", "What happens to your apps reaches one URL of yours, as signed JSON."),
    receiver,
    card("Deliveries", tester(), log),
  ];
}

// -- the receiver -----------------------------------------------------------------------------------------------

function show(place, webhook) {
  place.replaceChildren(webhook ? present(place, webhook) : setting(place));
}

function present(place, webhook) {
  const line = refusal();
  const change = () => {
    place.replaceChildren(setting(place, webhook));
    place.querySelector("input").focus();
  };
  const clear = async (button) => {
    const loss = "Events are no longer sent, and the signing secret is forgotten. A new URL gets a new secret.";
    if (!(await confirmed("Clear the webhook?", loss, "Clear"))) return button.focus();
    await call("DELETE", "/account/webhook");
    show(place, null);
    place.querySelector("input").focus();
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

function setting(place, before) {
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
    show(place, webhook);
    if (secret) place.append(secretPanel(secret));
    else document.querySelector("main h1").focus();
    announce("The webhook is set.");
  };
  const cancel = () => {
    show(place, before);
    place.querySelector("button").focus();
  };
  const beside = before && h("button", { type: "button", onclick: cancel }, "Cancel");
  return card(
    "Webhook",
    !before && empty("No webhook is set", "Until one is, events are dropped."),
    form("with-button", field("URL", url), h("button", { class: "main" }, "Save"), save, beside),
    before && h("p", { class: "small quiet" }, "Another URL gets another signing secret, and the present one ends."),
  );
}

const secretPanel = (secret) =>
  once(
    "Your signing secret",
    "It shows only this once. Your receiver needs it to verify what it gets, usually as SERVICE_WEBHOOK_SECRET.",
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
  if (!rows.length) return empty("Nothing was sent yet", "Every event shows here with its outcome, for 30 days.");
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

// `status` as an error is the very status that stands beside it.
function reason(status, error) {
  const told = [status && `status ${status}`, error !== "status" && error].filter(Boolean).join(", ");
  return told && h("span", { class: "small quiet" }, ` ${told}`);
}
