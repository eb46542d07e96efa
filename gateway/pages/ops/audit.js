// The audit trail: changes by operators, and reports.

import { h } from "/pages/dom.js";
import { capital, moment } from "/pages/format.js";
import { badge, facts, heading } from "/dashboard/parts.js";
import { openSheet } from "/dashboard/sheet.js";
import { filters, list, textFilter } from "./lists.js";

export const title = "Audit trail";

const LEADS = {
  changes: "Changes by operators, newest first, kept for 400 days.",
  reports: "Reports of watchdogs, scanners and deploy engines, newest first.",
};

function result({ status, code }) {
  if (status === null) return badge("Unknown", "warn");
  if (status < 400) return badge("Done", "good");
  return badge(`Refused: ${code || status}`, "bad");
}

const describe = (values) => Object.entries(values).map(([name, value]) => `${name} ${value}`).join(", ");

// Shows all of a record beside the list, whose rows have one line each.
function open(record) {
  const { at, operator, token, details, reason, requestId } = record;
  openSheet(
    capital(record.action.replaceAll("_", " ")),
    facts({
      Time: `${at.slice(0, 19).replace("T", " ")} UTC`,
      Operator: token ? `${operator}, token ${token}` : operator,
      Target: target(record.target),
      Result: result(record),
      Reason: reason || "None",
      ...Object.fromEntries(Object.entries(details).map(([name, value]) => [name, String(value)])),
      Request: h("code", { class: "small" }, requestId),
    }),
  );
}

const FILTERS = ["operator", "action", "target"];

function target(name) {
  if (!name) return "the service";
  if (name.startsWith("acc_")) return h("a", { href: `#/accounts/${name}` }, name);
  return name.startsWith("dep_") ? name : h("a", { href: `#/apps/${encodeURIComponent(name)}` }, name);
}

export async function draw(signal, _, query) {
  const trail = query.get("trail") === "reports" ? "reports" : "changes";
  const other = trail === "changes" ? "reports" : "changes";
  const chosen = { trail, ...Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""])) };
  chosen.action = chosen.action.toLowerCase().replaceAll(" ", "_"); // as the list shows it
  const controls = Object.fromEntries(FILTERS.map((name) => [capital(name), textFilter(name, query)]));
  const records = {
    path: "/platform/audit",
    query: chosen,
    read: (rows) => rows,
    cursor: "before",
    one: "record",
    none: "No record matches.",
    columns: {
      When: ({ at }) => moment(at),
      Operator: ({ operator, token }) => h("span", { title: token ? `token ${token}` : "signed in" }, operator),
      Action: (record) =>
        h("button", { type: "button", class: "plain opens", onclick: () => open(record) }, capital(record.action.replaceAll("_", " "))),
      Target: (record) => target(record.target),
      Details: ({ details: values }) => describe(values),
      Reason: ({ reason, details: values }) => reason || (trail === "changes" && values.reason) || "–",
      Result: result,
    },
  };
  return [
    heading(title, LEADS[trail]),
    filters("audit", "Filter", controls, query, ["trail"]),
    h("p", {}, h("a", { href: `#/audit?trail=${other}` }, `Show the ${other}`)),
    h("section", { class: "card audit" }, await list(records, signal)),
  ];
}
