// Shows the account's webhook: sets it, clears it, and rotates its signing secret.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call } from "./api.js";
import { action, announce, card, confirmAction, empty, field, form, refusal, showOnce } from "./parts.js";
import { may } from "./session.js";

const ROTATION =
  "You get a new secret. For 24 hours, webhook-signature carries signatures with both secrets, but X-Service-Signature " +
  "only the new one. A receiver that verifies X-Service-Signature rejects events until it has the new secret. " +
  "Redeliver the events that fail in the meantime.";
const AGAIN = " The previous secret stops signing immediately.";

// Calls `changed` with the webhook, or with null, now and after each change.
export function webhookPanel(webhook, changed) {
  // The secret has its own element, so that a change of the webhook does not remove it unread.
  const panel = { about: h("div", { class: "view" }), secret: h("div", { class: "view" }), changed };
  show(panel, webhook);
  return [panel.about, panel.secret];
}

function show(panel, webhook) {
  panel.about.replaceChildren(webhook ? present(panel, webhook) : urlForm(panel));
  panel.changed(webhook);
}

function present(panel, webhook) {
  const line = refusal();
  const change = () => {
    panel.about.replaceChildren(urlForm(panel, webhook));
    panel.about.querySelector("input").focus();
  };
  const rotate = async (button) => {
    const text = webhook.previousSecretUntil ? ROTATION + AGAIN : ROTATION;
    if (!(await confirmAction("Rotate the signing secret?", text, "Rotate"))) return button.focus();
    const { secret } = await call("POST", "/account/webhook/rotate");
    const previousSecretUntil = new Date(Date.now() + 86_400_000).toISOString();
    show(panel, { ...webhook, previousSecretUntil });
    reveal(panel, "Your new signing secret", secret);
    announce("Rotated the signing secret.");
  };
  const clear = async (button) => {
    const loss = "The service stops sending events and deletes the signing secret. A new URL gets a new secret.";
    if (!(await confirmAction("Clear the webhook?", loss, "Clear"))) return button.focus();
    await call("DELETE", "/account/webhook");
    panel.secret.replaceChildren();
    show(panel, null);
    panel.about.querySelector("input").focus();
    announce("Cleared the webhook.");
  };
  const until = webhook.previousSecretUntil && [" The previous secret also signs and expires ", moment(webhook.previousSecretUntil), "."];
  const set = h("p", { class: "small quiet" }, "Set ", moment(webhook.createdAt), ".", until);
  const buttons = [
    may("set_webhook") && h("button", { type: "button", "data-opens": "url", onclick: change }, "Change"),
    may("rotate_secret") && action("Rotate secret", {}, line, rotate),
    may("clear_webhook") && action("Clear", { class: "danger" }, line, clear),
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

function urlForm(panel, before) {
  const url = h("input", {
    id: "url",
    type: "url",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "https://example.com/events",
    "data-secret": true, // some receivers are known by their address
    value: before?.url,
  });
  const save = async () => {
    const { secret, ...webhook } = await call("PUT", "/account/webhook", { body: { url: url.value.trim() } });
    show(panel, secret ? webhook : { ...before, ...webhook });
    if (secret) reveal(panel, "Your signing secret", secret);
    else if (panel.isConnected) document.querySelector("main h1").focus();
    announce("Saved the webhook.");
  };
  const cancel = () => {
    show(panel, before);
    panel.about.querySelector("button").focus();
  };
  const extra = before && h("button", { type: "button", onclick: cancel }, "Cancel");
  return card(
    "Webhook",
    !before && empty("No webhook is set", "Without a webhook, events are dropped."),
    may("set_webhook") && form("with-button", field("URL", url), h("button", { class: "main" }, "Save"), save, extra),
    before && h("p", { class: "small quiet" }, "A new URL gets a new signing secret. The current secret becomes invalid."),
  );
}

function reveal(panel, title, secret) {
  const use = "It is shown only once. Your receiver needs it to verify events, usually as SERVICE_WEBHOOK_SECRET.";
  panel.secret.replaceChildren(showOnce(title, use, secret));
}
