// All accounts, with a search.

import { h } from "/pages/dom.js";
import { count, money, moment } from "/pages/format.js";
import { card, heading } from "/dashboard/parts.js";
import { list, search } from "./lists.js";
import { suspended } from "./suspension.js";

export const title = "Accounts";

export async function draw(signal, _, query) {
  const wanted = query.get("search") ?? "";
  const accounts = {
    path: "/platform/accounts",
    query: { search: wanted },
    read: (page) => page.accounts,
    cursor: "before",
    one: "account",
    none: wanted ? `No account has “${wanted}” in its name or id.` : "There are no accounts yet.",
    columns: {
      Account: ({ id, name }) => [h("a", { href: `#/accounts/${id}` }, name), h("span", { class: "small quiet" }, id)],
      Plan: (account) => suspended(account) ?? account.plan,
      Apps: ({ apps }) => count(apps),
      "Spent today": ({ settled, cap }) => `${money(settled)} of ${money(cap)}`,
      Created: ({ createdAt }) => moment(createdAt),
    },
  };
  return [
    heading(title, "Newest first."),
    search("Name or id", "accounts", wanted),
    card("", await list(accounts, signal)),
  ];
}
