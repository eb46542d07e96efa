// The deploys of all accounts that failed in the last 24 hours.

import { h } from "/pages/dom.js";
import { capital, moment } from "/pages/format.js";
import { card, heading } from "/dashboard/parts.js";
import { list } from "./lists.js";

export const title = "Failed deploys";

export async function draw(signal) {
  const deploys = {
    path: "/platform/deploys/failed",
    query: { limit: 100 },
    read: (rows) => rows,
    one: "deploy",
    none: "No deploy has failed in the last 24 hours.",
    columns: {
      App: ({ app, id }) => [app, h("span", { class: "small quiet" }, id)],
      Account: ({ account }) => h("a", { href: `#/accounts/${account}` }, account),
      Kind: ({ kind }) => capital(kind),
      Reason: ({ error }) => error ?? "–",
      Ended: ({ finishedAt }) => moment(finishedAt),
    },
  };
  return [heading(title, "Deploys of the last 24 hours, newest first, up to 100."), card("", await list(deploys, signal))];
}
