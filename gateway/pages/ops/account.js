// One account: its plan, spending, apps and API keys.

import { h } from "/pages/dom.js";
import { count, money, moment } from "/pages/format.js";
import { call, get } from "/dashboard/api.js";
import { share } from "/dashboard/chart.js";
import { action, announce, card, facts, field, form, heading, refusal, showOnce, table } from "/dashboard/parts.js";
import { columns as appColumns } from "./apps.js";
import { confirmAction } from "./confirm.js";
import { brake, suspended } from "./suspension.js";

export const title = "Account";
const PLANS = ["free", "starter", "maker", "max"];

export async function draw(signal, id) {
  const at = `/platform/accounts/${encodeURIComponent(id)}`;
  const account = await get(at, signal);
  return [
    heading(account.name, [h("code", { class: "small" }, account.id), " · created ", moment(account.createdAt)]),
    h("div", { class: "pair" }, spend(account), plan(account, at)),
    access(account, at),
    card("Apps", apps(account.appList)),
    card("API keys", keys(account, at), newKey(account, at)),
  ];
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
    if (!(await confirmAction("Change the plan?", text, "Change plan"))) return;
    await call("PATCH", at, { body: { plan: select.value } });
    dispatchEvent(new CustomEvent("show-again", { detail: `The account is on the ${select.value} plan.` }));
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
    if (!(await confirmAction("Change the daily cap?", text, "Change cap"))) return;
    await call("PATCH", at, { body: { dailyEuro: wanted } });
    dispatchEvent(new CustomEvent("show-again", { detail: "The daily cap is changed." }));
  };
  return form("with-button", field("Daily cap in euro, in place of the plan’s", euro), h("button", {}, "Change cap"), change);
}

function access(account, at) {
  const line = refusal();
  const lead = suspended(account) ?? "The account and its apps are not suspended, unless the list below says so.";
  return card("Access", h("p", {}, lead), h("div", { class: "row" }, brake(at, account.name, account.suspension, line)), line);
}

function apps(rows) {
  if (!rows.length) return h("p", { class: "empty" }, "The account has no apps.");
  const { Account, ...columns } = appColumns;
  return table("Apps of the account", columns, rows);
}

function keys({ name: account, keys: rows }, at) {
  const line = refusal();
  const revoke = async ({ id, name }) => {
    const text = `Requests of ${account} with the key ${name} get 401 at once, and its dashboard sessions end.`;
    if (!(await confirmAction("Revoke this API key?", text, "Revoke key"))) return;
    await call("DELETE", `${at}/keys/${encodeURIComponent(id)}`);
    dispatchEvent(new CustomEvent("show-again", { detail: "The key is revoked." }));
  };
  const columns = {
    Name: ({ name }) => name,
    Id: ({ id }) => h("code", { class: "small" }, id),
    Created: ({ createdAt }) => moment(createdAt),
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
    if (!(await confirmAction("Create an API key?", text, "Create key"))) return;
    const { key } = await call("POST", `${at}/keys`, { body: { name: name.value.trim() } });
    place.replaceChildren(showOnce("The new API key", "It is shown only once. Send it to the holder over a secure channel.", key));
  };
  const label = field("New key, if the holder lost theirs", name);
  return h("div", { class: "stack" }, form("with-button snug", label, h("button", {}, "Create key"), create), place);
}
