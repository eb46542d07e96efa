// Shows one app: its state, a day of requests, spending, deploys, health, and what is wrong.

import { chart } from "/pages/chart.js";
import { h, link } from "/pages/dom.js";
import { bare, capital, moment, plural } from "/pages/format.js";
import { call, get, stream } from "./api.js";
import { attentionStrip } from "./attention.js";
import { deployTable, isReplaced } from "./deploys.js";
import { follow, poll } from "./follow.js";
import { spentToday } from "./limits.js";
import { LogView } from "./log.js";
import { condition } from "./overview.js";
import { action, badge, card, confirmAction, empty, facts, heading, redraw, refusal, table } from "./parts.js";
import { RANGES, fetchUsage, fill, openRequests, requestSeries, startsOf } from "./periods.js";
import { publishZone } from "./publish.js";
import { may } from "./session.js";
import { openSheet } from "./sheet.js";
import { healthDays } from "./uptime.js";

export const title = "App";

const TIERS = { red: "bad", yellow: "warn" };
const DEPLOYS = 5;
const TAIL = 1000; // lines of output

export async function draw(signal, { app: name }) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  const [state, buttons, line] = [h("span"), h("div", { class: "row" }), refusal()];
  const [attention, check] = attentionStrip(signal, name);
  const [about, traffic, health, spent, deploys, troubles] = Array.from({ length: 6 }, () => h("div", { class: "stack" }));
  let app;
  const refresh = async (changed) => {
    const parts = [`${at}/findings`, `${at}/crashes`, `/account/deploys?app=${name}&limit=${DEPLOYS}`, `${at}/spend`];
    const [hours, account, capabilities, found, ...lists] = await Promise.all([
      fetchUsage(RANGES["24h"], "none", signal, name),
      ...["/account", "/capabilities", at, ...parts].map((path) => get(path, signal)),
    ]);
    app = found;
    redraw(state, app, condition);
    redraw(about, app, overview);
    redraw(traffic, fill(RANGES["24h"], hours), (rows) => lastDay(rows, name));
    redraw(spent, lists[3], spentToday);
    redraw(health, [app.health, app.healthDays], () => healthDays(app.healthDays));
    redraw(deploys, lists[2], (rows) => deployList(rows, app.name));
    redraw(troubles, [lists[0], lists[1], app.openFindings], () => troubleCards(lists[0], lists[1], app.openFindings));
    const canReturn = lists[2].some((deploy) => deploy.kind === "live" && isReplaced(deploy));
    redraw(buttons, [canReturn, app.liveDeploy], ([can]) => actions(app, at, can, line, signal));
    await check(account, capabilities, [app], changed);
  };
  await follow(["apps", "deploys", "requests", "usage"], signal, refresh);
  const drag = ({ dataTransfer }) =>
    may("publish") && dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]") && openPublish(app.name, signal);
  addEventListener("dragenter", drag, { signal });
  return [
    heading(app.name, state, buttons),
    line,
    attention,
    about,
    h("div", { class: "pair" }, card("Requests, last 24 hours", traffic), card("Spending today", spent)),
    card("Deploys", deploys),
    card("Health", health),
    troubles,
    (!app.build || app.build.start) && output(at, app.name, signal),
  ];
}

function actions(app, at, canRollBack, line, signal) {
  const back = action("Roll back", { "data-focus": "back" }, line, async (button) => {
    const effect = "After a health check, the release before the current one is live again. This counts toward today’s deploys.";
    if (!(await confirmAction(`Roll back ${app.name}?`, effect, "Roll back", { keep: "Not now", tone: "main" }))) return button.focus();
    const { deployId } = await call("POST", `${at}/rollback`);
    return `#/deploys/${deployId}`;
  });
  const publish = h("button", { type: "button", class: "main", "data-focus": "publish", "data-opens": "message", onclick: () => openPublish(app.name, signal) }, "Publish");
  return [app.liveDeploy && link(app.url, "Visit", "button"), canRollBack && may("roll_back") && back, may("publish") && publish];
}

function openPublish(name, signal) {
  openSheet(`Publish ${name}`, h("p", { class: "quiet" }, "It replaces the live release after a health check."), publishZone(() => name, signal));
}

function lastDay(rows, name) {
  if (!rows.some(({ requests }) => requests)) return empty("No requests yet", "The app’s requests appear here, by hour.");
  return chart("Requests", requestSeries(rows), startsOf(rows), { onpick: openRequests(name) });
}

// Cards of what is wrong. One line says that nothing is.
function troubleCards(findings, crashes, open) {
  if (!findings.length && !crashes.length) return h("p", { class: "quiet" }, "No open security findings and no crashes.");
  return [
    findings.length > 0 && card("Security findings", findingList(findings, open)),
    crashes.length > 0 && card("Crashes", crashList(crashes)),
  ];
}

function overview(app) {
  const { certificate, repository } = app;
  const domains = app.domains.map(({ domain, verified }) =>
    h("div", {}, link(`https://${domain}`, domain), !verified && " (not verified)"),
  );
  return facts({
    Address: link(app.url, bare(app.url)),
    "Custom domains": domains.length > 0 && domains,
    "Live deploy": app.liveDeploy
      ? h("a", { href: `#/deploys/${app.liveDeploy}` }, h("code", {}, app.liveDeploy))
      : "None yet",
    Certificate: certificate && [
      `${certificate.domain}${certificate.issuer ? `, issued by ${certificate.issuer}` : ""}, expires `,
      moment(certificate.expiresAt),
    ],
    Repository: repository && `${bare(repository.url)} at ${repository.branch ?? "its default branch"}`,
    Created: moment(app.createdAt),
  });
}

function findingList(findings, { red, yellow }) {
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
  return [deployTable(deploys), h("p", {}, h("a", { href: `#/apps/${name}/deploys` }, `All deploys of ${name}`))];
}

// -- output -----------------------------------------------------------------------------------------------------

// Shows the last lines, and new ones as they arrive. When the stream ends, it starts again with the last lines. Shows
// nothing if the app has no start command.
function output(at, name, signal) {
  const none = "No output yet.";
  const log = new LogView("Output", `${name}.log`, none);
  const add = (lines) => log.add(lines.map((text) => ({ text, at: null })));
  const shown = h("div", { hidden: true }, card("Output of the start command", log.panel));
  poll(500, signal, async (answered) => {
    log.clear();
    log.say(none);
    const show = () => {
      shown.hidden = false;
      answered();
    };
    try {
      await stream(`${at}/logs?tail=${TAIL}`, signal, add, show);
    } catch (error) {
      if (error.status !== 404) throw error;
      return "done";
    }
  });
  return shown;
}
