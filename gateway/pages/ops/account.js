// One account: its state, plan, spending, apps, members and API keys, and the operator's means against it.

import { h } from "/pages/dom.js";
import { capital, count, money, moment } from "/pages/format.js";
import { call, get } from "/dashboard/api.js";
import { share } from "/pages/chart.js";
import { action, announce, card, facts, field, form, note, refusal, showOnce, table } from "/dashboard/parts.js";
import { columns as appColumns } from "./apps.js";
import { confirmAction, makeChange } from "./confirm.js";
import { listDeploys } from "./deploys.js";
import { shortList } from "./lists.js";
import { brake, headingOf } from "./suspension.js";
import { chosenPeriod, fetchUsage, showUsage } from "./usage.js";

export const title = "Account";
export const PLANS = ["free", "starter", "maker", "max"];

export async function draw(signal, { id }, query) {
  const at = `/platform/accounts/${encodeURIComponent(id)}`;
  const period = chosenPeriod(query);
  const [account, usage, deploys] = await Promise.all([
    get(at, signal),
    fetchUsage(at, period, signal),
    get(`${at}/deploys?limit=5`, signal),
  ]);
  const changes = h("a", { href: `#/audit?target=${account.id}` }, "Changes by operators");
  const lead = [h("code", { class: "small" }, account.id), " · created ", moment(account.createdAt), " · ", changes];
  return [
    headingOf(account, lead, (line) => brake(at, account.name, account.suspension, line), (line) => deletion(account, at, line)),
    h("div", { class: "pair" }, spend(account), plan(account, at)),
    showUsage(`#/accounts/${id}`, period, usage, account.appList),
    h("p", {}, h("a", { href: `#/spending?account-id=${id}` }, "Spending on any dates, by model or provider")),
    card("Apps", apps(account.appList, query)),
    h("div", { class: "pair" }, card("Last deploys", listDeploys(deploys)), card("Members", members(account.members))),
    card("API keys", keys(account, at), newKey(account, at)),
  ];
}

function deletion({ name, deletesAt }, at, line) {
  const remove = async () => {
    const text = "Its apps stop at once. After the grace they are deleted with their data, keys and logs; until then its owner can keep the account.";
    const reason = await confirmAction(`Delete ${name}?`, text, "Delete account", { type: name, required: true });
    if (reason === null) return;
    await makeChange("DELETE", at, { reason }, `${name} will be deleted.`);
  };
  return !deletesAt && action("Delete account", { class: "danger" }, line, remove);
}

function spend({ settled, reserved, cap, deploysToday, deploysPerDay }) {
  const spoken = `${money(settled + reserved)} of ${money(cap)}`;
  return card(
    "Today",
    h("p", { class: "figure" }, money(settled), h("small", {}, ` of ${money(cap)}`)),
    share(cap, { settled, reserved }, spoken),
    facts({ Reserved: money(reserved), Deploys: `${count(deploysToday)} of ${count(deploysPerDay)}` }),
  );
}

function plan(account, at) {
  const options = PLANS.map((name) => h("option", { selected: name === account.plan }, name));
  const select = h("select", { id: "plan" }, options);
  const change = async () => {
    if (select.value === account.plan) return announce("The account is already on this plan.");
    const text = `${account.name} moves from ${account.plan} to ${select.value}. Its limits change within a second.`;
    const reason = await confirmAction("Change the plan?", text, "Change plan");
    if (reason === null) return;
    await makeChange("PATCH", at, { body: { plan: select.value }, reason }, `The account is on the ${select.value} plan.`);
  };
  const planForm = form("with-button", field("Plan", select), h("button", {}, "Change plan"), change);
  return card("Plan", planForm, cap(account, at));
}

// An empty field means the plan's cap.
function cap({ name, dailyEuro }, at) {
  const hint = { inputmode: "decimal", autocomplete: "off", placeholder: "the plan’s", value: dailyEuro ?? "" };
  const euro = h("input", { id: "daily-euro", ...hint });
  const change = async () => {
    const wanted = euro.value.trim() || null;
    if (wanted === dailyEuro) return announce("The account has this cap already.");
    const text = `${name} may spend ${wanted === null ? "what its plan allows" : `€${wanted}`} per day.`;
    const reason = await confirmAction("Change the daily cap?", text, "Change cap");
    if (reason === null) return;
    await makeChange("PATCH", at, { body: { dailyEuro: wanted }, reason }, "The daily cap is changed.");
  };
  return form("with-button", field("Daily cap in euro, in place of the plan’s", euro), h("button", {}, "Change cap"), change);
}

// Those that need attention come first.
function apps(rows, query) {
  if (!rows.length) return h("p", { class: "empty" }, "The account has no apps.");
  const { Account, ...columns } = appColumns;
  const calm = (app) => !app.suspension && app.health !== "unhealthy" && !app.openFindings.red;
  const sorted = rows.toSorted((a, b) => calm(a) - calm(b) || a.name.localeCompare(b.name));
  return shortList({ id: "app", rows: sorted, text: ({ id, name, url }) => `${id} ${name} ${url}`, columns, label: "Apps of the account", one: "app", filter: "Name, id or address" }, query);
}

function members(rows) {
  if (!rows.length) return h("p", { class: "empty" }, "The account has no members, only API keys.");
  const columns = {
    Address: ({ email }) => h("a", { href: `mailto:${encodeURIComponent(email).replace("%40", "@")}` }, email),
    Role: ({ role, state }) => [capital(role), state === "invited" && note("invited")],
    Since: ({ since }) => moment(since),
  };
  const owners = rows.filter(({ role }) => role === "owner");
  return table("Members of the account", columns, [...owners, ...rows.filter(({ role }) => role !== "owner")]);
}

function keys({ name: account, keys: rows }, at) {
  const line = refusal();
  const revoke = async ({ id, name }) => {
    const text = `Requests of ${account} with the key ${name} get 401 at once, and its dashboard sessions end.`;
    const reason = await confirmAction("Revoke this API key?", text, "Revoke key", { required: true });
    if (reason === null) return;
    await makeChange("DELETE", `${at}/keys/${encodeURIComponent(id)}`, { reason }, "The key is revoked.");
  };
  const columns = {
    Name: ({ name }) => name,
    Id: ({ id }) => h("code", { class: "small" }, id),
    Created: ({ createdAt }) => moment(createdAt),
    By: ({ by }) => by ?? "",
    "Last used": ({ lastUsedAt }) => (lastUsedAt ? moment(lastUsedAt) : "never"),
    "": (key) => action("Revoke", { class: "danger", "aria-label": `Revoke ${key.name}` }, line, () => revoke(key)),
  };
  return rows.length ? [table("API keys of the account", columns, rows), line] : h("p", { class: "empty" }, "The account has no API keys.");
}

function newKey(account, at) {
  const properties = { required: true, maxlength: 100, autocomplete: "off", value: "replacement" };
  const name = h("input", { id: "key-name", ...properties });
  const place = h("div");
  const create = async () => {
    const text = `Create a key only if the holder of ${account.name} lost theirs. It gives full access to the account.`;
    const reason = await confirmAction("Create an API key?", text, "Create key");
    if (reason === null) return;
    const { key } = await call("POST", `${at}/keys`, { body: { name: name.value.trim() }, reason });
    place.replaceChildren(showOnce("The new API key", "It is shown only once. Send it to the holder over a secure channel.", key));
  };
  const label = field("New key, if the holder lost theirs", name);
  return h("div", { class: "stack" }, form("with-button snug", label, h("button", {}, "Create key"), create), place);
}
