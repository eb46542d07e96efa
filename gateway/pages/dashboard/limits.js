// The card with one app's limits: today's spending and a form to change the limits.

import { h } from "/pages/dom.js";
import { count, money, moneyLeft } from "/pages/format.js";
import { call, get } from "./api.js";
import { key, share } from "/pages/chart.js";
import { follow } from "./follow.js";
import { announce, card, field, form, redraw } from "./parts.js";
import { may } from "./session.js";

const AMOUNT = [/^\d+(\.\d{1,9})?$/, "Enter an amount in euros, such as 0.02, or leave the field empty for the plan’s limit."];
const NUMBER = [/^\d{1,9}$/, "Enter a whole number, or leave the field empty for the plan’s limit."];
const FIELDS = {
  dailyEuro: ["Euros per day", AMOUNT],
  userDailyEuro: ["Euros per day and user", AMOUNT],
  requestsPerMinute: ["Requests per minute", NUMBER],
  userRequestsPerMinute: ["Requests per minute and user", NUMBER],
};

export async function limitsCard(name, signal) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  const [today, inputs, hints] = [h("div", { class: "stack" }), {}, {}];
  const fields = Object.entries(FIELDS).map(([limit, [label]]) => {
    const [id, hint] = [`limit-${limit}`, `limit-${limit}-hint`];
    hints[limit] = h("p", { id: hint, class: "small quiet" });
    inputs[limit] = h("input", { id, autocomplete: "off", "aria-describedby": hint, placeholder: "none" });
    inputs[limit].inputMode = limit.endsWith("Euro") ? "decimal" : "numeric";
    return h("div", { class: "stack" }, field(label, inputs[limit]), hints[limit]);
  });
  let limits, widest;

  const refresh = async () => {
    const spend = await get(`${at}/spend`, signal);
    widest = spend.widest;
    redraw(today, spend, spentToday);
    for (const limit in FIELDS) if (!invalid(inputs[limit])) hint(limit);
  };
  const hint = (limit) => {
    const allowed = limit.endsWith("Euro") ? money(widest[limit] * 1e9) : count(widest[limit]);
    hints[limit].textContent = `The plan allows ${allowed}.`;
    hints[limit].className = "small quiet";
    inputs[limit].removeAttribute("aria-invalid");
  };
  const complain = (limit, text) => {
    hints[limit].textContent = text;
    hints[limit].className = "small refusal";
    inputs[limit].setAttribute("aria-invalid", "true");
    inputs[limit].focus();
    announce(text);
  };
  const show = (found) => {
    limits = found;
    for (const limit in FIELDS) inputs[limit].value = limits[limit] ?? "";
  };

  // Sends only the changed fields, so that it does not undo changes made elsewhere.
  const save = async () => {
    saved.textContent = "";
    for (const limit in FIELDS) hint(limit);
    const body = {};
    for (const [limit, [, [pattern, rule]]] of Object.entries(FIELDS)) {
      const text = inputs[limit].value.trim().replace(",", ".");
      if (text === String(limits[limit] ?? "")) continue;
      if (text && !pattern.test(text)) return complain(limit, rule);
      body[limit] = text ? (limit.endsWith("Euro") ? text : Number(text)) : null;
    }
    try {
      show(await call("PUT", `${at}/limits`, { body }));
    } catch (error) {
      const [limit, ...reason] = error.message.split(": ");
      if (error.status !== 400 || !(limit in FIELDS)) throw error;
      return complain(limit, sentence(reason.join(": ")));
    }
    saved.textContent = "Saved. The limits apply within a second.";
    announce("Limits saved.");
    await refresh();
  };
  const saved = h("span", { class: "small quiet" });
  const button = may("change_limits") && h("button", { class: "main" }, "Save limits");

  show(await get(`${at}/limits`, signal));
  await follow(["apps", "usage"], signal, refresh);
  return card(
    "Limits",
    today,
    h("p", { class: "quiet" }, "The plan’s limits are the maximum. A limit of 0 blocks all requests."),
    form("limits", fields, button, save, saved),
  );
}

const invalid = (input) => input.getAttribute("aria-invalid") === "true";
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export function spentToday({ settled, reserved, cap, widest }) {
  const own = cap < Math.round(widest.dailyEuro * 1e9); // otherwise it is the account's cap, which other apps use too
  const left = moneyLeft(cap, settled + reserved);
  const spoken = `${money(settled)} settled, ${money(reserved)} reserved, of ${money(cap)}`;
  const bounds = ` of ${money(cap)} today${own ? "" : ", shared by all apps"}`;
  return [
    h("p", { class: "figure" }, money(settled + reserved), h("small", {}, bounds)),
    share(cap, { settled, reserved }, spoken),
    key([
      ["settled", "settled", money(settled)],
      ["reserved", "reserved", money(reserved)],
      ...(own ? [["", "left", left]] : []),
    ]),
  ];
}
