// The deploys of all accounts that failed in the last 24 hours.

import { h } from "/pages/dom.js";
import { capital, moment } from "/pages/format.js";
import { badge, card, heading, note, table } from "/dashboard/parts.js";
import { list } from "./lists.js";

export const title = "Failed deploys";

const TONES = { failed: "bad", live: "good", canceled: "idle" };

function stateOf({ state, current, error }) {
  const replaced = state === "live" && current === false;
  const mark = replaced ? badge("Replaced", "idle") : badge(capital(state), TONES[state] ?? "busy");
  return error ? [mark, note(error)] : mark;
}

// The last deploys of an account or an app.
export function listDeploys(rows) {
  if (!rows.length) return h("p", { class: "empty" }, "No deploys yet.");
  const columns = {
    App: ({ app, kind }) => [h("a", { href: `#/apps/${encodeURIComponent(app)}` }, app), kind === "preview" && ", preview"],
    State: stateOf,
    Queued: ({ createdAt }) => moment(createdAt),
  };
  return table("Last deploys", columns, rows);
}

export async function draw(signal) {
  const deploys = {
    path: "/platform/deploys/failed",
    query: { limit: 100 },
    read: (rows) => rows,
    one: "deploy",
    none: "No deploy has failed in the last 24 hours.",
    columns: {
      App: ({ app, id }) => [h("a", { href: `#/apps/${encodeURIComponent(app)}` }, app), note(id)],
      Account: ({ account }) => h("a", { href: `#/accounts/${account}` }, account),
      Kind: ({ kind }) => capital(kind),
      Reason: ({ error }) => error ?? "–",
      Ended: ({ finishedAt }) => moment(finishedAt),
    },
  };
  return [heading(title, "Deploys of the last 24 hours, newest first, up to 100."), card("", await list(deploys, signal))];
}
