// Shows one deploy: its phases, its log, and what can be done with it.

import { h, link } from "/pages/dom.js";
import { bare, capital, duration, keepCurrent, moment, sentence, timer } from "/pages/format.js";
import { call, get } from "./api.js";
import { commitOf, kindOf, stateOf } from "./deploys.js";
import { poll } from "./follow.js";
import { LogView } from "./log.js";
import { action, announce, badge, card, confirmAction, facts, heading, redraw, refusal } from "./parts.js";
import { may } from "./session.js";

export const title = "Deploy";
export const titled = true; // the view sets the page's title, with the state

const OVER = ["live", "failed", "canceled"];
const CANCELABLE = ["queued", "building"];
const PHASES = { build: "Build", health: "Health check", canary: "Canary" };
const PROGRESS = {
  done: ["done", "good"],
  running: ["running", "busy"],
  failed: ["failed", "bad"],
  canceled: ["canceled", ""],
  waiting: ["waiting", ""],
  skipped: ["not run", ""],
};

export async function draw(signal, { id }) {
  const log = new LogView("Build log", `${id}.log`, "No log output yet.");
  const [state, line] = [h("div"), refusal()];
  const [outcome, details] = [1, 2].map(() => h("section", { class: "card" }));
  const buttons = h("div", { class: "row" });
  let deploy;
  let read = 0; // lines of the log
  const over = () => OVER.includes(deploy.state);
  const refresh = async () => {
    const [before, after] = [deploy?.state, read];
    const address = `/account/deploys/${encodeURIComponent(id)}?logAfter=${after}`;
    const { log: text, logTimes, logLines, ...rest } = await get(address, signal);
    deploy = rest;
    if (before && before !== deploy.state) announce(`The deploy is ${deploy.state}.`);
    if (before !== deploy.state) document.title = `${capital(deploy.state)}: deploy of ${deploy.app} · Capsule`;
    redraw(state, deploy, stateOf);
    redraw(outcome, deploy, progress);
    redraw(details, deploy, about);
    redraw(buttons, [deploy.state, deploy.kind, deploy.current, deploy.url], () => actions(deploy, line, refresh));
    if (read === after) log.add(lines(text, logTimes, Date.parse(deploy.createdAt))); // else another refresh was faster
    read = Math.max(read, logLines);
    if (deploy.state === "failed") log.markFailure();
    log.say(over() ? "No log output." : "No log output yet.");
    return over() ? "done" : "";
  };
  if ((await refresh()) !== "done") {
    poll(1000, signal, refresh);
    const refreshing = setInterval(keepCurrent, 1000);
    signal.addEventListener("abort", () => clearInterval(refreshing), { once: true });
  }
  return [
    h("p", { class: "small" }, h("a", { href: "#/deploys" }, "All deploys")),
    heading(`Deploy of ${deploy.app}`, h("code", {}, deploy.id), state),
    outcome,
    buttons,
    line,
    card("Log", log.panel),
    details,
  ];
}

function lines(text, times, queued) {
  const texts = text ? text.replace(/\n$/, "").split("\n") : [];
  return texts.map((text, n) => ({ text, at: typeof times?.[n] === "number" ? queued + times[n] : null }));
}

// Returns the buttons for the deploy in its state.
function actions({ id, app, kind, state, current, url }, line, refresh) {
  const at = (path) => `/account/${path.map(encodeURIComponent).join("/")}`;
  const steer = (label, tone, question, path, body, method = "POST") =>
    action(label, { class: tone, "data-focus": label }, line, async (button) => {
      if (!(await confirmAction(...question, label, { keep: "Not now" }))) return button.focus();
      const answer = await call(method, at(path), { body });
      if (answer?.deployId) return `#/deploys/${answer.deployId}`;
      await refresh();
    });
  const buttons = [];
  if (CANCELABLE.includes(state) && may("cancel")) {
    const question = ["Cancel this deploy?", "The deploy ends without a release. The app keeps serving its current release."];
    buttons.push(steer("Cancel", "plain danger", question, ["deploys", id, "cancel"]));
  }
  if (state === "live" && kind === "preview" && may("promote")) {
    const effect = `After a health check, its release replaces the live one. ${QUOTA}`;
    const question = [`Make this preview of ${app} live?`, effect];
    buttons.push(steer("Promote", "main", question, ["deploys", id, "promote"]));
  }
  const slug = /--p-([a-z0-9-]+)\./.exec(url)?.[1];
  if (kind === "preview" && current && slug && may("end_preview")) {
    const question = ["End this preview?", "Nobody can open its address any more. The live version stays as it is."];
    buttons.push(steer("End preview", "plain danger", question, ["apps", app, "previews", slug], undefined, "DELETE"));
  }
  if (state === "live" && kind === "live" && !current && may("roll_back")) {
    const effect = `After a health check, it replaces the live release. ${QUOTA}`;
    const question = [`Roll back ${app} to this release?`, effect];
    buttons.push(steer("Roll back to this release", "plain", question, ["apps", app, "rollback"], { deployId: id }));
  }
  if (OVER.includes(state) && may("redeploy")) buttons.push(redeployAction({ id, app }, "Redeploy", "plain", line));
  return buttons;
}

function progress(deploy) {
  const error = deploy.error && h("p", { class: "refusal cut" }, deploy.error.startsWith("capsule.toml") ? deploy.error : sentence(deploy.error));
  const address = deploy.url && h("p", {}, link(deploy.url, bare(deploy.url)));
  return [phases(deploy), error, afterwards(deploy), address];
}

const about = (deploy) =>
  facts({
    App: h("a", { href: `#/apps/${deploy.app}` }, deploy.app),
    Kind: kindOf(deploy),
    Trigger: capital(deploy.trigger),
    By: deploy.by,
    Message: deploy.message,
    Branch: deploy.branch,
    Commit: deploy.commit && h("code", {}, commitOf(deploy)),
    Warning: deploy.warning,
    Release: deploy.release && h("a", { href: `#/deploys/${deploy.release}` }, h("code", {}, deploy.release)),
    Queued: moment(deploy.createdAt),
    "Waits for": deploy.waitsFor && sentence(deploy.waitsFor),
    Position: deploy.position,
    Took: deploy.durationMs !== undefined && duration(deploy.durationMs),
  });

// What is still served after a failure, and what to do.
function afterwards({ app, state, stillServed, nextStep }) {
  if (!["failed", "canceled"].includes(state)) return;
  const former = stillServed && h("a", { href: `#/deploys/${stillServed}` }, h("code", {}, stillServed));
  const section = (key, text) => h("a", { href: `#/apps/${app}/settings/${key}` }, text);
  const set = nextStep?.variable && [section("environment", `Set ${nextStep.variable}`), ", or run ", h("code", {}, nextStep.command)];
  const settings = ["Settings: ", section("source", "Source and build"), ", ", section("environment", "Environment")];
  return [
    h("p", {}, former ? ["Its address still serves ", former, "."] : "Its address serves nothing yet."),
    nextStep && h("p", {}, nextStep.text, " ", set || settings),
  ];
}

const QUOTA = "This counts toward today’s deploys.";

// A button that builds the source of a deploy again.
export function redeployAction({ id, app }, text, tone, line) {
  return action(text, { class: tone, "data-focus": "redeploy" }, line, async (button) => {
    const what = `A new deploy builds the same source, or the latest commit of the branch. ${QUOTA}`;
    if (!(await confirmAction(`Build ${app} again?`, what, "Redeploy", { keep: "Not now", tone: "main" }))) return button.focus();
    const { deployId } = await call("POST", `/account/deploys/${encodeURIComponent(id)}/redeploy`);
    return `#/deploys/${deployId}`;
  });
}

function phases({ phases, state: deployState }) {
  const item = ({ phase, state, startedAt, durationMs }) => {
    const [word, tone] = PROGRESS[state === "waiting" && OVER.includes(deployState) ? "skipped" : state];
    const time = state === "running" && startedAt ? timer(startedAt) : durationMs !== undefined && duration(durationMs);
    return h(
      "li",
      { class: tone ? null : "quiet" },
      badge(PHASES[phase], tone),
      h("span", { class: "unseen" }, `: ${word}`),
      time && h("span", { class: "small quiet" }, " ", time),
    );
  };
  return h("ol", { class: "phases", "aria-label": "Phases" }, phases.map(item));
}
