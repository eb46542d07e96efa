// Shows the account at a glance: today's spending, the last day's requests, and the health of its apps.

import { h, link } from "/pages/dom.js";
import { bare, capital, moment, money, moneyLeft, plural, since } from "/pages/format.js";
import { get } from "./api.js";
import { attentionStrip } from "./attention.js";
import { chart, key, share, sparkline } from "/pages/chart.js";
import { follow } from "./follow.js";
import { invitationCard } from "./invitations.js";
import { onboarding } from "./onboarding.js";
import { announce, badge, empty, field, furtherRows, heading, redraw } from "./parts.js";
import { RANGES, addUp, fetchUsage, fill, openRequests, requestSeries, startsOf } from "./periods.js";
import { keepQuery } from "./query.js";
import { may } from "./session.js";

export const title = "Overview";

const STATUS = {
  operational: ["Operational", "good"],
  disabled: ["Off", "bad"],
  misconfigured: ["Misconfigured", "bad"],
  "quota-exhausted": ["Quota exhausted", "warn"],
  "provider-unreachable": ["Provider unreachable", "bad"],
};
const HEALTH = { healthy: "good", unhealthy: "bad" };
const ORDERS = { "": "Failing first", name: "By name", requests: "Most requests first" };
const FEW = 9; // apps that are shown at first, without a filter
const PAGE = 30; // more apps with each further step

// The query holds the filter and the order of the apps.
export async function draw(signal, _groups, query) {
  const [spending, traffic] = Array.from({ length: 2 }, () => h("section", { class: "card" }));
  const [apps, showApps] = appSection(query);
  const [steps, guide] = onboarding(signal, () => refresh());
  const [attention, check] = attentionStrip(signal);
  let account;
  const refresh = async (changed = new Set()) => {
    const [found, capabilities, usage, owned] = await Promise.all([
      get("/account", signal),
      get("/capabilities", signal),
      fetchUsage(RANGES["24h"], "app", signal),
      get("/account/apps", signal),
    ]);
    account = found;
    redraw(spending, [account, capabilities], () => spend(account, capabilities));
    redraw(traffic, fill(RANGES["24h"], usage), lastDay);
    const [failing] = await Promise.all([check(account, capabilities, owned, changed), owned.length <= FEW && guide(account, owned)]);
    showApps(owned, usage, failing);
  };
  await follow(["apps", "deliveries", "deploys", "keys", "requests", "service", "usage"], signal, refresh);
  return [heading("Overview", `${account.name}, on the ${capital(account.plan)} plan.`), invitationCard(), attention, may("create_app") && steps, h("div", { class: "pair" }, spending, traffic), apps];
}

function spend({ spend: { day, settled, reserved, cap } }, { managedInferenceStatus: status }) {
  const parts = { settled, reserved };
  const left = moneyLeft(cap, settled + reserved);
  const shares = Object.entries(parts).map(([name, value]) => [name, name, money(value)]);
  const spoken = `${money(settled)} settled, ${money(reserved)} reserved, ${left} left of ${money(cap)}`;
  const reset = new Date(Date.parse(day) + 86_400_000).toISOString();
  const elapsed = (Date.now() - Date.parse(day)) / 86_400_000;
  const forecast = Math.round(settled / Math.min(1, Math.max(elapsed, 1 / 24)));
  return [
    h("div", { class: "row apart" }, h("h2", {}, "Spending today"), badge(...(STATUS[status] ?? [capital(status)]))),
    h("p", { class: "figure" }, money(settled + reserved), h("small", {}, ` of ${money(cap)}`)),
    share(cap, parts, spoken),
    key([...shares, ["", "left", left]]),
    h("p", { class: "small quiet" }, settled > 0 && `At this rate, ${money(forecast)} by midnight. `, "Resets ", moment(reset), ", at 00:00 UTC."),
  ];
}

function lastDay(hours) {
  const total = addUp(hours);
  const lost = `Interrupted answers cost ${money(total.interruptedNanoEuro)}, because each is charged at its maximum cost. `;
  return [
    h("h2", {}, "Last 24 hours"),
    total.requests
      ? chart("Requests", requestSeries(hours), startsOf(hours), { onpick: openRequests() })
      : empty("No requests yet", "Your apps’ requests and tokens appear here, by hour."),
    total.interrupted > 0 && h("p", { class: "small quiet" }, lost, h("a", { href: "#/usage" }, "See usage")),
  ];
}

// Returns the section with the apps, and a function that shows them. `failing` has the names of those with a problem.
function appSection(query) {
  const find = h("input", { id: "find", type: "search", autocomplete: "off", spellcheck: "false", value: query.get("find") });
  const options = Object.entries(ORDERS).map(([value, name]) => h("option", { value, selected: query.get("order") === value }, name));
  const order = h("select", { id: "order" }, options);
  const choices = h("div", { class: "fields" }, field("Find an app", find), field("Order", order));
  const list = h("div", { class: "stack" });
  let [known, shown] = [[[], [], new Set()], FEW];
  const draw = () => {
    const [apps, usage, failing] = known;
    const wanted = find.value.trim().toLowerCase();
    const by = Map.groupBy(usage, ({ app }) => app);
    const requestsOf = ({ name }) => addUp(by.get(name) ?? []).requests;
    const ranks = { "": (app) => failing.has(app.name) || Boolean(app.suspension), requests: requestsOf, name: () => 0 };
    const rank = ranks[order.value];
    const found = apps.filter(({ name }) => name.includes(wanted)).sort((a, b) => rank(b) - rank(a) || (a.name < b.name ? -1 : 1));
    choices.hidden = apps.length <= FEW;
    redraw(list, [found.slice(0, shown), usage, [...failing], found.length, wanted], () => appList(found, by, failing, shown, wanted, more));
  };
  const more = () => {
    shown += PAGE;
    draw();
  };
  const choose = () => {
    shown = FEW;
    keepQuery({ find: find.value.trim(), order: order.value });
    draw();
  };
  find.addEventListener("input", choose);
  find.addEventListener("change", () => announce(plural(list.querySelectorAll(".apps > li").length, "app")));
  order.addEventListener("change", choose);
  const create = may("create_app") && h("a", { class: "button main", href: "#/new-app" }, "New app");
  const section = h("section", { class: "card" }, h("div", { class: "row apart" }, h("h2", {}, "Apps"), create), choices, list);
  return [section, (...now) => ((known = now), draw())];
}

function appList(apps, usage, failing, shown, wanted, more) {
  if (!apps.length && wanted) return empty("No such app", `No app’s name contains “${wanted}”.`);
  if (!apps.length) return empty("No apps yet", "Your first app gets its own address.");
  const cards = apps.slice(0, shown).map((app) => appCard(app, usage.get(app.name) ?? [], failing.has(app.name)));
  return [h("ul", { class: "apps" }, cards), apps.length > shown && furtherRows(shown, plural(apps.length, "app"), more)];
}

function appCard(app, usage, isFailing) {
  const own = app.domains.find(({ verified }) => verified);
  const address = own ? `https://${own.domain}` : app.url;
  const { red = 0, yellow = 0 } = app.openFindings ?? {};
  return h(
    "li",
    {},
    h("h3", {}, h("a", { href: `#/apps/${app.name}` }, app.name)),
    h("p", {}, condition(app)),
    h("p", { class: "small" }, link(address, bare(address))),
    usage.length > 0 && [
      sparkline(fill(RANGES["24h"], usage).map(({ requests }) => requests), "soft"),
      h("p", { class: "small quiet" }, `${plural(addUp(usage).requests, "request")} in 24 hours`),
    ],
    h(
      "p",
      { class: "small quiet row remarks" },
      isFailing && badge("Needs attention", "warn"),
      app.certificateExpiresAt && h("span", {}, "Certificate expires ", moment(app.certificateExpiresAt)),
      red > 0 && h("a", { href: `#/apps/${app.name}` }, badge(plural(red, "red finding"), "bad")),
      yellow > 0 && h("a", { href: `#/apps/${app.name}` }, badge(plural(yellow, "yellow finding"), "warn")),
    ),
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
