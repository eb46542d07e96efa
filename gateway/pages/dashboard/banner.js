// A banner above every view while the account is suspended, or while the day's spending cap is nearly or fully used: the
// reason, and what to do.

import { h } from "/pages/dom.js";
import { money, moneyLeft, moment, plural } from "/pages/format.js";
import { get } from "./api.js";
import { follow } from "./follow.js";
import { announce, redraw } from "./parts.js";

const NEAR = 0.8; // of the cap
const DAY = 86_400_000; // ms

const banner = document.querySelector("#banner");

// Until the signal aborts. If a refresh fails, the banner does not change: the view reports the failure.
export function watchSpend(signal) {
  const attempt = () =>
    refresh(signal).catch((error) => {
      if (!signal.aborted && error.status === undefined) reportError(error); // a bug
    });
  follow(["apps", "usage"], signal, attempt);
  signal.addEventListener("abort", () => (banner.hidden = true), { once: true }); // logged out
}

async function refresh(signal) {
  const { spend, suspension, deletesAt } = await get("/account", signal);
  if (deletesAt) return show("suspended", deletesAt, () => explainDeletion(deletesAt));
  if (suspension) return show("suspended", suspension, () => explainSuspension(suspension));
  if (spend.settled + spend.reserved < NEAR * spend.cap) {
    banner.hidden = true;
    return;
  }
  const [usage, refused] = await Promise.all([
    get(`/account/usage?by=day&from=${spend.day}`, signal),
    get("/account/requests?code=SPEND_CAP_REACHED", signal),
  ]);
  const { interrupted = 0, interruptedNanoEuro = 0 } = usage.rows.at(-1) ?? {};
  const facts = { ...spend, interrupted, interruptedNanoEuro, refused: refused.filter(({ at }) => at >= spend.day).length };
  const state = facts.refused || spend.settled + spend.reserved >= spend.cap ? "reached" : "near";
  show(state, facts, () => explain(state, facts));
}

function show(state, facts, draw) {
  const isNew = banner.hidden || banner.dataset.state !== state;
  banner.dataset.state = state;
  banner.hidden = false;
  redraw(banner, [state, facts], draw);
  if (isNew) announce(banner.querySelector("strong").textContent);
}

function explainSuspension({ reason, at }) {
  const effect = "Apps answer no requests, and nothing can be deployed. Ask the operator of this service to lift it.";
  return [
    h("p", {}, h("strong", {}, "Your account is suspended."), ` ${reason}`),
    h("p", { class: "small" }, "Since ", moment(at), ". ", effect),
  ];
}

function explainDeletion(deletesAt) {
  const effect = "Apps answer no requests, and nothing can be changed. To bring everything back, ";
  return [
    h("p", {}, h("strong", {}, "Your account is being deleted "), moment(deletesAt), "."),
    h("p", { class: "small" }, effect, h("a", { href: "#/account" }, "keep the account"), "."),
  ];
}

function explain(state, { day, settled, reserved, cap, interrupted, interruptedNanoEuro, refused }) {
  const used = settled + reserved;
  const headline =
    state === "reached"
      ? "Today’s spending cap is reached."
      : `${Math.floor((used / cap) * 100)}% of today’s spending cap is used.`;
  const parts = [
    `${money(settled)} of ${money(cap)} is spent`,
    interrupted > 0 && `including ${money(interruptedNanoEuro)} for ${plural(interrupted, "interrupted answer")}`,
    reserved > 0 && `${money(reserved)} is reserved for running requests`,
    `${moneyLeft(cap, used)} is left`,
  ];
  const rule = "A request that could cost more than the rest gets 402 SPEND_CAP_REACHED";
  const rejected = refused ? ` (${plural(refused, "request")} today). ` : ". ";
  const reset = moment(new Date(Date.parse(day) + DAY).toISOString());
  return [
    h("p", {}, h("strong", {}, headline), ` ${parts.filter(Boolean).join(", ")}.`),
    h("p", { class: "small" }, rule, rejected, "The cap resets ", reset, ", at 00:00 UTC. ", h("a", { href: "#/usage" }, "See usage")),
  ];
}
