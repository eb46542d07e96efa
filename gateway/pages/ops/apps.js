// The apps of all accounts, with a search, and the unhealthy apps.

import { h, link } from "/pages/dom.js";
import { bare, capital, plural, since } from "/pages/format.js";
import { badge, card, heading, note, refusal } from "/dashboard/parts.js";
import { filters, list, search } from "./lists.js";
import { brake, stateOf } from "./suspension.js";

export const title = "Apps";

export const HEALTH = { healthy: "good", unhealthy: "bad" };

export const addressOf = ({ id }) => `/platform/apps/${encodeURIComponent(id)}`;

export const isSuspended = ({ suspension, accountSuspension }) => Boolean(suspension ?? accountSuspension);

export const columns = {
  App: ({ id, name, url }) => [h("a", { href: `#/apps/${id}` }, name), note(link(url, bare(url)))],
  Account: ({ account, accountName }) => h("a", { href: `#/accounts/${account}` }, accountName),
  Status: (app) => (isSuspended(app) ? stateOf(app) : capital(app.status)),
  Health: ({ health, healthSince }) =>
    health === "unknown"
      ? "–"
      : [badge(capital(health), HEALTH[health]), healthSince && note(since(healthSince))],
  "Red findings": ({ openFindings }) => (openFindings.red ? badge(plural(openFindings.red, "finding"), "bad") : "–"),
  "": (app) => {
    const line = refusal();
    return [brake(addressOf(app), app.name, app.suspension, line), line];
  },
};

export async function draw(signal, _, query) {
  const wanted = query.get("search") ?? "";
  const unhealthy = query.get("health") === "unhealthy";
  const filter = unhealthy
    ? h("a", { href: "#/apps" }, "Show all apps")
    : h("a", { href: "#/apps?health=unhealthy" }, "Show unhealthy apps");
  const found = wanted ? `No app matches “${wanted}”.` : "There are no apps yet.";
  const apps = {
    path: "/platform/apps",
    query: unhealthy ? { health: "unhealthy" } : { search: wanted },
    read: (page) => page.apps,
    cursor: "after",
    one: "app",
    none: unhealthy ? "All probed apps are healthy." : found,
    columns,
  };
  const lead = unhealthy ? ["Unhealthy apps", "Longest first."] : [title, "Sorted by id."];
  return [
    heading(...lead),
    !unhealthy && filters("apps", "Search", { "App, domain or account": search(query) }, query),
    h("p", {}, filter),
    card("", await list(apps, signal)),
  ];
}
