// Shows one delivery: the request that was sent, and the receiver's response.

import { h } from "/pages/dom.js";
import { duration, moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { poll } from "./follow.js";
import { notesOn, outcomeOf } from "./webhooks.js";
import { action, announce, badge, card, copier, facts, heading, refusal } from "./parts.js";
import { may } from "./session.js";

export const title = "Delivery";

const POLL = 1000; // ms

export async function draw(signal, { id }) {
  const delivery = await get(`/account/deliveries/${encodeURIComponent(id)}`, signal);
  const { type, app, at, eventAt, durationMs, url, redelivery, request, response } = delivery;
  const line = refusal();
  const attempts = h("div");
  const again = may("redeliver") && action("Redeliver", { class: "main" }, line, async () => {
    const latest = `/account/deliveries/${encodeURIComponent(delivery.id)}`; // the id of an event selects its newest attempt
    const before = await get(latest, signal);
    await call("POST", `${latest}/redeliver`);
    announce(`Queued ${type} again.`);
    attempts.replaceChildren(h("p", {}, badge(`Attempt ${before.redelivery + 2}`, "busy"), " sending …"));
    poll(POLL, signal, async () => showNewest(attempts, await get(latest, signal), before));
  });
  const about = {
    App: app,
    Occurred: moment(eventAt),
    Sent: moment(at),
    Took: duration(durationMs),
    Attempt: String(redelivery + 1),
    Notes: notesOn(delivery),
  };
  return [
    h("p", { class: "small" }, h("a", { href: "#/webhooks" }, "All deliveries")),
    heading(type, h("code", {}, delivery.id), h("div", {}, outcomeOf(delivery))),
    h("section", { class: "card" }, url && h("code", { class: "cut" }, url), facts(about), h("div", {}, again), attempts, line),
    payload(request.body),
    card("Request headers", headers(request.headers, "No request was sent.")),
    response ? answer(response) : card("Response", h("p", { class: "quiet" }, "The receiver did not respond.")),
  ];
}

// Shows the newest attempt once it is in the log.
function showNewest(element, newest, before) {
  if (newest.attempt === before.attempt) return "";
  const see = h("a", { href: `#/webhooks/${newest.attempt}` }, `Attempt ${newest.redelivery + 1}`);
  element.replaceChildren(h("p", {}, see, " ", outcomeOf(newest)));
  return "done";
}

const text = (content, label) => h("pre", { class: "log", tabindex: "0", "aria-label": label }, content);

function headers(values, missing) {
  const lines = Object.entries(values).map(([name, value]) => `${name}: ${value}`);
  return lines.length ? text(lines.join("\n"), "Headers") : h("p", { class: "quiet" }, missing);
}

// Shows the payload with line breaks. A copy has the exact bytes that were signed.
function payload(body) {
  if (body === null) return card("Payload", h("p", { class: "quiet" }, "The payload is no longer stored."));
  const shown = text(JSON.stringify(JSON.parse(body), null, 2), "Payload");
  const note = h("p", { class: "small quiet" }, "“Copy” copies the exact signed payload, in one line.");
  const title = h("div", { class: "row apart" }, h("h2", {}, "Payload"), copier(body, shown));
  return h("section", { class: "card" }, title, shown, note);
}

const answer = ({ status, headers: values, body }) =>
  card(`Response, status ${status}`, headers(values, "No headers."), text(body || "No body.", "Body"));
