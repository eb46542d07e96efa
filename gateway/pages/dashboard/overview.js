// Shows the account at a glance: today's spending, the last day's requests, and the health of its apps.

import { h, link } from "/pages/dom.js";
import { bare, capital, count, moment, money, plural, since, size } from "/pages/format.js";
import { get } from "./api.js";
import { attentionStrip } from "./attention.js";
import { OUTCOMES, bars, key, share } from "./chart.js";
import { onboarding } from "./onboarding.js";
import { badge, card, empty, facts, follow, heading, redraw } from "./parts.js";
import { RANGES, addUp, answered, fetchUsage, fill, scale } from "./periods.js";

export const title = "Overview";

const STATUS = {
  operational: ["Operational", "good"],
  disabled: ["Off", "bad"],
  misconfigured: ["Misconfigured", "bad"],
  "quota-exhausted": ["Quota exhausted", "warn"],
  "provider-unreachable": ["Provider unreachable", "bad"],
};
const HEALTH = { healthy: "good", unhealthy: "bad" };

export async function draw(signal) {
  const today = h("div", { class: "pair" });
  const [traffic, apps] = [h("section", { class: "card" }), h("section", { class: "card" })];
  const [steps, guide] = onboarding(signal, () => refresh());
  const [attention, check] = attentionStrip(signal);
  let account;
  const refresh = async () => {
    const [found, capabilities, usage, owned] = await Promise.all([
      get("/account", signal),
      get("/capabilities", signal),
      fetchUsage(RANGES["24h"], "none", signal),
      get("/account/apps", signal),
    ]);
    account = found;
    redraw(today, [account, capabilities], () => [spend(account), limits(account, capabilities)]);
    redraw(traffic, fill(RANGES["24h"], usage), lastDay);
    redraw(apps, owned, appList);
    await Promise.all([guide(account, owned), check(account, capabilities, owned)]);
  };
  await refresh();
  follow(5_000, signal, refresh);
  return [heading("Overview", `${account.name}, on the ${capital(account.plan)} plan.`), attention, steps, today, traffic, apps];
}

function spend({ spend: { day, settled, reserved, cap } }) {
  const parts = { settled, reserved };
  const left = money(Math.max(0, cap - settled - reserved));
  const shares = Object.entries(parts).map(([name, value]) => [name, name, money(value)]);
  const spoken = `${money(settled)} settled, ${money(reserved)} reserved, ${left} left of ${money(cap)}`;
  const reset = new Date(Date.parse(day) + 86_400_000).toISOString();
  return card(
    "Inference today",
    h("p", { class: "figure" }, money(settled + reserved), h("small", {}, ` of ${money(cap)}`)),
    share(cap, parts, spoken),
    key([...shares, ["", "left", left]]),
    h("p", { class: "small quiet" }, "Resets ", moment(reset), ", at 00:00 UTC."),
  );
}

function limits({ limits, deploysToday, storage }, { managedInferenceStatus }) {
  const entries = facts({
    "Managed inference": badge(...(STATUS[managedInferenceStatus] ?? [capital(managedInferenceStatus)])),
    "Deploys today": `${count(deploysToday)} of ${count(limits.deploysPerDay)}`,
    "Requests per app": `${count(limits.requestsPerMinutePerApp)} per minute`,
    "Requests per user": `${count(limits.requestsPerMinutePerUser)} per minute`,
    "Stored deliveries": `${size(storage.bytes)} of ${size(storage.limit)}`,
    "Request size": `up to ${Math.round(limits.maxRequestBytes / 1024)} KB`,
    "Answer length": `up to ${count(limits.maxOutputTokens)} tokens`,
  });
  return card("Limits", entries);
}

function lastDay(hours) {
  const requests = { answered, refused: (hour) => hour.refused, interrupted: (hour) => hour.interrupted };
  const tokens = { in: (hour) => hour.inputTokens, out: (hour) => hour.outputTokens };
  const words = scale(RANGES["24h"], hours);
  const total = addUp(hours);
  const lost = `Interrupted answers cost ${money(total.interruptedNanoEuro)}, because each is charged at its maximum cost. `;
  return [
    h("h2", {}, "Last 24 hours"),
    total.requests
      ? h("div", { class: "pair" }, bars("Requests", hours, requests, { ...words, classes: OUTCOMES }), bars("Tokens", hours, tokens, words))
      : empty("No requests yet", "Your apps’ requests and tokens appear here, by hour."),
    total.interrupted > 0 && h("p", { class: "small quiet" }, lost, h("a", { href: "#/usage" }, "See usage")),
  ];
}

function appList(apps) {
  const none = empty("No apps yet", "Your first app gets its own address.");
  const more = h("a", { class: "button", href: "#/new-app" }, "New app");
  return [h("div", { class: "row apart" }, h("h2", {}, "Apps"), more), apps.length ? h("ul", { class: "list" }, apps.map(appRow)) : none];
}

function appRow(app) {
  const addresses = [app.url, ...(app.customDomain && app.customDomainVerified ? [`https://${app.customDomain}`] : [])];
  const { red = 0, yellow = 0 } = app.openFindings ?? {};
  const remarks = [
    app.certificateExpiresAt && h("span", {}, "Certificate expires ", moment(app.certificateExpiresAt)),
    red > 0 && h("a", { href: `#/apps/${app.name}` }, badge(plural(red, "red finding"), "bad")),
    yellow > 0 && h("a", { href: `#/apps/${app.name}` }, badge(plural(yellow, "yellow finding"), "warn")),
  ];
  return h(
    "li",
    {},
    h("h3", {}, h("a", { href: `#/apps/${app.name}` }, app.name)),
    h("p", { class: "end" }, condition(app)),
    h("p", { class: "small" }, joinWithDots(addresses.map((address) => link(address, bare(address))))),
    h("p", { class: "small quiet row remarks" }, remarks),
  );
}

// Only live apps on a plan with probes have a known health.
export function condition({ status, health, healthSince, suspension }) {
  if (suspension) return [badge("Suspended", "bad"), h("span", { class: "small" }, " ", suspension.reason)];
  if (!(health in HEALTH)) return status === "live" ? badge("Live", "good") : badge("Never live");
  return [
    badge(capital(health), HEALTH[health]),
    healthSince && h("span", { class: "small quiet" }, " ", since(healthSince)),
  ];
}

const joinWithDots = (parts) => parts.flatMap((part, n) => (n ? [" · ", part] : [part]));
