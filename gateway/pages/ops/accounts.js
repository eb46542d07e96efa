// All accounts, with a search and filters.

import { h } from "/pages/dom.js";
import { count, money, moment } from "/pages/format.js";
import { card, heading, note } from "/dashboard/parts.js";
import { PLANS } from "./account.js";
import { choiceFilter, filters, list, search } from "./lists.js";
import { stateOf } from "./suspension.js";

export const title = "Accounts";

const FILTERS = {
  plan: { "": "All plans", ...Object.fromEntries(PLANS.map((plan) => [plan, plan])) },
  suspended: { "": "All states", true: "Suspended", false: "Not suspended" },
  sort: { "": "Newest first", spend: "Spending today" },
};

export async function draw(signal, _, query) {
  const names = ["search", ...Object.keys(FILTERS)];
  const chosen = Object.fromEntries(names.map((name) => [name, query.get(name)]).filter(([, value]) => value));
  const [plan, suspended, sort] = Object.entries(FILTERS).map(([name, options]) => choiceFilter(name, options, query));
  const accounts = {
    path: "/platform/accounts",
    query: chosen,
    read: (page) => page.accounts,
    cursor: "before",
    one: "account",
    none: noneOf(chosen),
    columns: {
      Account: ({ id, name }) => [h("a", { href: `#/accounts/${id}` }, name), note(id)],
      Plan: ({ plan }) => plan,
      State: (account) => stateOf(account),
      Apps: ({ apps }) => count(apps),
      "Spent today": ({ settled, cap }) => `${money(settled)} of ${money(cap)}`,
      Created: ({ createdAt }) => moment(createdAt),
    },
  };
  return [
    heading(title, chosen.sort ? "Those that spent something today, the highest spending first." : "Newest first."),
    filters("accounts", "Search", { "Name or id": search(query), Plan: plan, State: suspended, Sort: sort }, query),
    card("", await list(accounts, signal)),
  ];
}

function noneOf({ search, ...others }) {
  if (search) return `No account has “${search}” in its name or id.`;
  return Object.keys(others).length ? "No account matches." : "There are no accounts yet.";
}
