// Shows one delivery: the request that was sent, and the receiver's response.

import { h } from "/pages/dom.js";
import { duration, moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { outcomeOf } from "./notifications.js";
import { action, announce, card, facts, heading, refusal } from "./parts.js";

export const title = "Delivery";

export async function draw(signal, id) {
  const delivery = await get(`/account/deliveries/${encodeURIComponent(id)}`, signal);
  const { type, app, at, durationMs, url, request, response } = delivery;
  const line = refusal();
  const again = action("Redeliver", { class: "main" }, line, async () => {
    await call("POST", `/account/deliveries/${encodeURIComponent(delivery.id)}/redeliver`);
    announce(`${type} is on its way again.`);
  });
  return [
    h("p", { class: "small" }, h("a", { href: "#/notifications" }, "All deliveries")),
    heading(type, h("code", {}, delivery.id), h("div", {}, outcomeOf(delivery))),
    h(
      "section",
      { class: "card" },
      facts({ URL: url && h("code", { class: "cut" }, url), App: app, Sent: moment(at), Took: duration(durationMs) }),
      again,
      line,
    ),
    card("Request", message(request, "Its data is no longer stored.")),
    card(
      response ? `Response, status ${response.status}` : "Response",
      response ? message(response, "") : h("p", { class: "quiet" }, "The receiver did not answer."),
    ),
  ];
}

function message({ headers, body }, missing) {
  const lines = Object.entries(headers).map(([name, value]) => `${name}: ${value}`);
  const log = (text, label) => h("pre", { class: "log", tabindex: "0", "aria-label": label }, text);
  return [
    lines.length > 0 && log(lines.join("\n"), "Headers"),
    body === null ? h("p", { class: "quiet" }, missing) : log(body || "No body.", "Body"),
  ];
}
