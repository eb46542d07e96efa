// The audit trail: changes by operators, and reports.

import { h } from "/pages/dom.js";
import { capital, moment } from "/pages/format.js";
import { badge, card, heading } from "/dashboard/parts.js";
import { list } from "./lists.js";

export const title = "Audit trail";

const LEADS = {
  changes: "Changes made with an operator token, newest first, kept for 400 days.",
  reports: "Reports of watchdogs, scanners and deploy engines, newest first.",
};

function result({ status, code }) {
  if (status === null) return badge("Unknown", "warn");
  if (status < 400) return badge("Done", "good");
  return [badge("Refused", "bad"), h("span", { class: "small quiet" }, code || String(status))];
}

const details = (values) =>
  Object.entries(values).map(([name, value]) => h("span", { class: "detail" }, `${name} `, h("b", {}, String(value))));

export async function draw(signal, _, query) {
  const trail = query.get("trail") === "reports" ? "reports" : "changes";
  const other = trail === "changes" ? "reports" : "changes";
  const records = {
    path: "/platform/audit",
    query: { trail },
    read: (rows) => rows,
    cursor: "before",
    one: "record",
    none: "There are no records yet.",
    columns: {
      "When, UTC": ({ at }) => [moment(at), h("span", { class: "small quiet" }, at.slice(0, 19).replace("T", " "))],
      Operator: ({ operator, token }) => [operator, h("span", { class: "small quiet" }, `token ${token}`)],
      Action: ({ action }) => capital(action.replaceAll("_", " ")),
      Target: ({ target }) =>
        target.startsWith("acc_") ? h("a", { href: `#/accounts/${target}` }, target) : target || "the service",
      Details: ({ details: values }) => details(values),
      Result: result,
    },
  };
  return [
    heading(title, LEADS[trail]),
    h("p", {}, h("a", { href: `#/audit?trail=${other}` }, `Show the ${other}`)),
    card("", await list(records, signal)),
  ];
}
