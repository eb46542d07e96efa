// One app: its state, usage, deploys and settings, and the operator's means against it.

import { h, link } from "/pages/dom.js";
import { bare, capital, moment, plural, since } from "/pages/format.js";
import { call, get } from "/dashboard/api.js";
import { action, badge, card, facts, note } from "/dashboard/parts.js";
import { HEALTH, addressOf } from "./apps.js";
import { confirmAction } from "./confirm.js";
import { listDeploys } from "./deploys.js";
import { brake, headingOf } from "./suspension.js";
import { chosenPeriod, fetchUsage, showUsage } from "./usage.js";

export const title = "App";

export async function draw(signal, { id }, query) {
  const record = await get(addressOf({ id }), signal);
  const at = `/platform/accounts/${encodeURIComponent(record.account)}`;
  const period = chosenPeriod(query);
  const [account, usage, deploys] = await Promise.all([
    get(at, signal),
    fetchUsage(at, period, signal, record.name),
    get(`${at}/deploys?${new URLSearchParams({ limit: 5, app: record.id })}`, signal),
  ]);
  const app = account.appList.find((each) => each.id === record.id) ?? { ...record, health: "unknown", openFindings: {} };
  const lead = [
    h("code", { class: "small" }, record.id),
    " · account ",
    h("a", { href: `#/accounts/${account.id}` }, account.name),
    ` on the ${account.plan} plan · created `,
    moment(record.createdAt),
    " · ",
    link(record.url, bare(record.url)),
    " · ",
    h("a", { href: `#/audit?target=${record.id}` }, "Changes by operators"),
  ];
  return [
    headingOf(app, lead, (line) => brake(addressOf(record), record.name, record.suspension, line), (line) => deletion(record, line)),
    card("State", state(app)),
    showUsage(`#/apps/${id}`, period, usage),
    h("div", { class: "pair" }, card("Last deploys", listDeploys(deploys)), card("Settings", settings(record))),
  ];
}

function state(app) {
  const { health, healthSince, certificateExpiresAt, openFindings, status } = app;
  return facts({
    Status: status && badge(capital(status), status === "live" ? "good" : "idle"),
    Health: health === "unknown" ? "Not probed" : [badge(capital(health), HEALTH[health]), healthSince && note(since(healthSince))],
    Certificate: certificateExpiresAt && ["expires ", moment(certificateExpiresAt)],
    Findings: openFindings.red ? badge(plural(openFindings.red, "red finding"), "bad") : "None open in red",
  });
}

function settings({ auth, domains, repository, build, limits }) {
  const shown = (values) =>
    Object.entries(values ?? {})
      .filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => `${name} ${value}`)
      .join(", ");
  return facts({
    "User tokens": shown(auth),
    "Custom domains": domains.map(({ domain, verified }) => domain + (verified ? "" : " (not verified)")).join(", ") || "None",
    Repository: repository ? `${repository.url} at ${repository.branch ?? "its default branch"}` : "None",
    Build: shown(build) || "None",
    Limits: shown(limits) || "The service’s",
  });
}

function deletion(record, line) {
  const remove = async () => {
    const text = "Its releases, data, hooks and variables are deleted too. This cannot be undone.";
    const reason = await confirmAction(`Delete ${record.name}?`, text, "Delete app", { type: record.name, required: true });
    if (reason === null) return;
    await call("DELETE", addressOf(record), { reason });
    return `#/accounts/${record.account}`;
  };
  return action("Delete app", { class: "danger" }, line, remove);
}
