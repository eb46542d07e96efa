// Shows one app: address, health, findings, crashes, deploys, environment, output and hooks.

import { h, link } from "/pages/dom.js";
import { bare, capital, moment, plural } from "/pages/format.js";
import { call, get, stream } from "./api.js";
import { showSettings } from "./app-settings.js";
import { dataCard } from "./data.js";
import { deployTable } from "./deploys.js";
import { domainCard } from "./domain.js";
import { limitsCard } from "./limits.js";
import { LogView } from "./log.js";
import { condition } from "./overview.js";
import {
  action,
  announce,
  badge,
  card,
  confirmAction,
  empty,
  facts,
  field,
  follow,
  form,
  heading,
  redraw,
  refusal,
  table,
} from "./parts.js";
import { publishZone } from "./publish.js";
import { healthDays } from "./uptime.js";

export const title = "App";

const TIERS = { red: "bad", yellow: "warn" };
const DEPLOYS = 5;
const TAIL = 1000; // lines of output

export async function draw(signal, name) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  const [state, about, health] = [h("div"), h("section", { class: "card" }), h("section", { class: "card" })];
  const [findings, crashes, deploys, hooks, variables] = Array.from({ length: 5 }, () => h("div", { class: "stack" }));
  const domain = domainCard(at);
  const data = dataCard(at);
  let app;
  const refresh = async () => {
    const parts = [`${at}/findings`, `${at}/crashes`, `/account/deploys?app=${name}&limit=${DEPLOYS}`, "/account/hooks"];
    const [found, ...lists] = await Promise.all([at, ...parts].map((path) => get(path, signal)));
    app = found;
    redraw(state, app, condition);
    redraw(about, app, overview);
    redraw(health, [app.health, app.healthDays], () => [h("h2", {}, "Health"), healthDays(app.healthDays)]);
    redraw(findings, [lists[0], app.openFindings], () => findingList(lists[0], app.openFindings));
    redraw(crashes, lists[1], crashList);
    redraw(deploys, lists[2], (rows) => deployList(rows, app.name));
    await domain.refresh(app, signal);
    await data.refresh(app, signal);
    redraw(hooks, lists[3].filter((hook) => hook.app === app.name), hookList);
  };
  const show = (rows) => redraw(variables, rows, (list) => variableList(list, at, show));
  await Promise.all([refresh(), get(`${at}/env`, signal).then(show)]);
  const settings = h("div", { class: "view" });
  await showSettings(settings, name, signal);
  follow(5000, signal, refresh);
  return [
    heading(app.name, "", state),
    about,
    card("Publish", publishZone(() => app.name, signal)),
    health,
    card("Deploys", deploys),
    card("Security findings", findings),
    card("Crashes", crashes),
    app.build?.start && card("Output of the start command", output(at, app.name, signal)),
    card("Environment", h("p", { class: "quiet" }, "Changes apply from the next deploy."), variableForm(at, show), variables),
    data.card,
    domain.card,
    await limitsCard(name, signal),
    card("Deploy hooks", hooks),
    settings,
  ];
}

function overview(app) {
  const { certificate, repository } = app;
  const domain = app.customDomain && link(`https://${app.customDomain}`, app.customDomain);
  return facts({
    Address: link(app.url, bare(app.url)),
    "Custom domain": domain && [domain, !app.customDomainVerified && " (not verified)"].filter(Boolean),
    "Live deploy": app.liveDeploy
      ? h("a", { href: `#/deploys/${app.liveDeploy}` }, h("code", {}, app.liveDeploy))
      : "None yet",
    Certificate: certificate && [
      `${certificate.domain}${certificate.issuer ? `, issued by ${certificate.issuer}` : ""}, expires `,
      moment(certificate.expiresAt),
    ],
    Repository: repository && `${bare(repository.url)} at ${repository.branch}`,
    Usage: h("a", { href: "#/usage" }, "Requests and spending"),
    Model: h("a", { href: `#/apps/${app.name}/try` }, "Try it"),
    Created: moment(app.createdAt),
  });
}

function findingList(findings, { red, yellow }) {
  if (!findings.length) return empty("No open findings", "Findings of security scans appear here.");
  const columns = {
    Finding: ({ cve }) => h("code", {}, cve),
    Package: ({ component }) => component,
    Severity: ({ severity, tier }) => badge(capital(severity), TIERS[tier]),
    "Fixed in": ({ fixedIn }) => fixedIn ?? "No fix yet",
    Deadline: ({ deadlineAt }) => moment(deadlineAt),
  };
  const total = red + yellow;
  const rest = total > findings.length && `Showing the ${findings.length} most urgent of ${plural(total, "finding")}.`;
  return [table("Security findings", columns, findings), rest && h("p", { class: "small quiet" }, rest)];
}

function crashList(crashes) {
  const kept = "The last 20 crashes of the past 30 days appear here, each with its last output.";
  if (!crashes.length) return empty("No crashes", kept);
  const one = ({ at, reason, exitCode, lines }) =>
    h(
      "li",
      {},
      h("h3", {}, reason === "oom" ? "Out of memory" : "Process exited"),
      h("p", { class: "end small quiet" }, exitCode !== null && `Exit code ${exitCode} · `, moment(at)),
      lines.length > 0 &&
        h(
          "details",
          { class: "whole" },
          h("summary", { class: "small" }, "Last output"),
          h("pre", { class: "log", tabindex: "0", "aria-label": "Last output" }, lines.join("\n")),
        ),
    );
  return h("ul", { class: "list" }, crashes.map(one));
}

function deployList(deploys, name) {
  if (!deploys.length) return empty("No deploys yet", "Publish the app, or trigger one of its hooks.");
  return [deployTable(deploys), h("p", {}, h("a", { href: `#/deploys/app/${name}` }, `All deploys of ${name}`))];
}

function hookList(hooks) {
  const all = h("p", {}, h("a", { href: "#/hooks" }, "Manage hooks"));
  if (!hooks.length) return [empty("No hooks yet", "A hook is a secret URL that rebuilds this app."), all];
  const columns = {
    Name: ({ name }) => name,
    Created: ({ createdAt }) => moment(createdAt),
    "Last used": ({ lastUsedAt }) => (lastUsedAt ? moment(lastUsedAt) : h("span", { class: "quiet" }, "Never")),
  };
  return [table("Deploy hooks", columns, hooks), all];
}

// -- environment ------------------------------------------------------------------------------------------------

function variableForm(at, show) {
  const name = h("input", { id: "variable", required: true, autocomplete: "off", placeholder: "e.g. DATABASE_URL" });
  const value = h("input", { id: "value", type: "password", autocomplete: "new-password" });
  const set = async () => {
    const after = await call("PUT", `${at}/env`, { body: { [name.value]: value.value } });
    announce(`Set ${name.value}.`);
    name.value = value.value = "";
    show(after);
  };
  const button = h("button", { class: "main" }, "Set");
  return form("with-button two", [field("Name", name), field("Value", value)], button, set);
}

function variableList(variables, at, show) {
  if (!variables.length) return empty("No variables yet", "Builds and the start command can read the variables that you set.");
  const line = refusal();
  const remove = ({ name }) => {
    const named = { class: "plain danger", "data-focus": name, "aria-label": `Remove ${name}` };
    return action("Remove", named, line, async (button) => {
      const loss = "You cannot recover its value.";
      if (!(await confirmAction(`Remove ${name}?`, loss, "Remove"))) return button.focus();
      show(await call("PUT", `${at}/env`, { body: { [name]: null } }));
    });
  };
  const columns = {
    Name: ({ name }) => h("code", {}, name),
    Set: ({ updatedAt }) => moment(updatedAt),
    "": remove,
  };
  return [table("Environment variables", columns, variables), line];
}

// -- output -----------------------------------------------------------------------------------------------------

// Shows the last lines, and new ones as they arrive. When the stream ends, it starts again with the last lines.
function output(at, name, signal) {
  const none = "No output yet.";
  const log = new LogView("Output", `${name}.log`, none);
  follow(500, signal, async () => {
    log.clear();
    log.say(none);
    await stream(`${at}/logs?tail=${TAIL}`, signal, (lines) => log.add(lines.map((text) => ({ text, at: null }))));
  });
  return log.panel;
}
