// Lists the account's deploys, and starts new ones.

import { h, link } from "/pages/dom.js";
import { bare, capital, duration, moment, sentence } from "/pages/format.js";
import { get } from "./api.js";
import { searchable } from "./app_search.js";
import { follow } from "./follow.js";
import {
  action,
  badge,
  card,
  choice,
  empty,
  field,
  heading,
  redraw,
  refusal,
  run,
  table,
} from "./parts.js";
import { openPreview } from "./preview.js";
import { publishZone } from "./publish.js";
import { keepQuery } from "./query.js";
import { may } from "./session.js";

export const title = "Deploys";

const TONES = { live: "good", failed: "bad", canceled: "", building: "busy", checking: "busy", canary: "busy" };
const PAGE = 30;

// Whether its address serves another release now, or a preview nothing.
export const isReplaced = ({ state, current }) => state === "live" && !current;

export const stateOf = (deploy) =>
  isReplaced(deploy) ? badge(kindOf(deploy) ? "Ended" : "Replaced") : badge(capital(deploy.state), TONES[deploy.state]);

// Most deploys are for the live address, and "live" is a state as well.
export const kindOf = ({ kind }) => kind === "preview" && "Preview";

export const commitOf = ({ commit, dirty }) => commit && `${commit.slice(0, 7)}${dirty ? " with changes" : ""}`;

// With `app`, the view is about this app alone. The query can hold the app whose deploys are shown.
export async function draw(signal, { app: chosen = "" }, query) {
  const log = new Log(signal, chosen || (query.get("app") ?? ""));
  const only = searchable(h("select", { "aria-label": "Show" }, h("option", { value: "" }, "All apps")));
  const [apps] = await Promise.all([get("/account/apps", signal), follow(["deploys"], signal, log.refresh)]);
  only.append(...apps.map(({ name }) => h("option", {}, name)));
  only.value = log.app;
  only.addEventListener("change", () => {
    keepQuery({ app: only.value });
    log.choose(only.value);
  });
  const title = h("div", { class: "row apart" }, h("h2", {}, "History"), !chosen && apps.length > 1 && h("div", {}, only));
  return [
    heading("Deploys", `The last 1,000 deploys${chosen && ` of ${chosen}`}${chosen ? " in" : " of"} the past 90 days, newest first.`),
    apps.length > 0 && card("Publish", publishForm(chosen ? apps.filter(({ name }) => name === chosen) : apps, !chosen, signal)),
    card(title, log.stale, log.panel),
  ];
}

// The newest deploys, which are refreshed, and the older pages that the user opened.
class Log {
  constructor(signal, app) {
    this.signal = signal;
    this.app = app;
    this.stale = refusal(); // tells why the rows are not those of the choice
    this.panel = h("div", { class: "stack" });
    this.rows = new Map(); // by id
    this.more = false;
  }

  choose(app) {
    this.app = app;
    this.rows.clear();
    this.more = false;
    run(this.stale, this.refresh);
  }

  refresh = () => this.load();

  async load(before) {
    const app = this.app;
    const query = new URLSearchParams({ limit: PAGE });
    for (const [name, value] of Object.entries({ app, before })) if (value) query.set(name, value);
    const page = await get(`/account/deploys?${query}`, this.signal);
    if (app !== this.app) return; // the choice has changed
    this.stale.textContent = "";
    if (before || !this.rows.size) this.more = page.length === PAGE;
    // A new deploy can replace the current one, but older pages are not fetched again.
    const served = new Set(page.filter(({ current }) => current).map(addressOf));
    for (const row of this.rows.values()) if (served.has(addressOf(row))) row.current = false;
    for (const row of page) this.rows.set(row.id, row);
    const rows = [...this.rows.values()].sort((a, b) => (a.id < b.id ? 1 : -1)); // ids sort by time
    redraw(this.panel, { rows, more: this.more }, (data) => this.draw(data));
  }

  draw({ rows, more }) {
    if (!rows.length) return empty("No deploys yet", "Publish an app, or trigger one of its hooks.");
    const line = refusal();
    const older = () => this.load(rows.at(-1).id);
    return [deployTable(rows), more && action("Older", { "data-focus": "older" }, line, older), line];
  }
}

const addressOf = ({ app, url }) => `${app} ${url}`;

export function deployTable(deploys) {
  const named = ({ id, app }) => ({ href: `#/deploys/${id}`, "data-focus": id, "aria-label": `${app}, deploy ${id}` });
  const columns = {
    App: (deploy) => h("a", named(deploy), deploy.app),
    State: stateOf,
    From: (deploy) => {
      const { message, trigger, branch, by } = deploy;
      const parts = [...new Set([kindOf(deploy), trigger, branch, commitOf(deploy), by])].filter(Boolean).join(" · ");
      return [message && [message, " "], h("span", { class: "quiet" }, parts)];
    },
    Result: result,
    Queued: ({ createdAt, durationMs }) => [
      moment(createdAt),
      durationMs !== undefined && h("span", { class: "quiet" }, ` · ${duration(durationMs)}`),
    ],
  };
  return table("Deploys", columns, deploys, "compact deploys");
}

function result({ url, error, waitsFor, position }) {
  if (error) return h("span", { class: "reason", title: sentence(error) }, sentence(error));
  if (url) return link(url, bare(url));
  return waitsFor && h("span", { class: "quiet" }, `${position ? `Position ${position}, w` : "W"}aits for ${waitsFor}`);
}

function publishForm(apps, choosable, signal) {
  const app = searchable(choice("app", apps.map(({ name }) => name), "Choose an app"));
  const line = refusal();
  const preview = action("Publish a preview", { "data-focus": "preview", "data-opens": "branch preview-message" }, line, async () => {
    if (!app.value) throw { status: 400, message: "Choose an app first." };
    openPreview(await get(`/account/apps/${encodeURIComponent(app.value)}`, signal), signal);
  });
  return [
    choosable && h("div", { class: "fields" }, field("App", app)),
    publishZone(() => app.value, signal),
    may("publish") && h("div", { class: "row" }, preview),
    line,
  ];
}
