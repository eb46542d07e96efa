// Shows one deploy and follows its log.

import { h, link } from "/pages/dom.js";
import { capital, duration, moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { stateOf } from "./deploys.js";
import { action, announce, badge, card, confirmed, extend, facts, follow, heading, redraw, refusal } from "./parts.js";

export const title = "Deploy";

const OVER = ["live", "failed", "canceled"];
const CANCELABLE = ["queued", "building"];
const PHASES = { build: "Build", health: "Health check", canary: "Canary" };
const AT = { building: "build", checking: "health", canary: "canary" };

export async function draw(signal, id) {
  const log = h("pre", { class: "log", role: "log", tabindex: "0", "aria-label": "Build log" });
  const [state, details, line] = [h("div"), h("section", { class: "card" }), refusal()];
  const buttons = h("div", { class: "row" });
  let deploy;
  const over = () => OVER.includes(deploy.state);
  const refresh = async () => {
    const before = deploy?.state;
    const { log: text, ...rest } = await get(`/account/deploys/${encodeURIComponent(id)}`, signal);
    deploy = rest;
    if (before && before !== deploy.state) announce(`The deploy is ${deploy.state}.`);
    redraw(state, deploy, stateOf);
    redraw(details, deploy, about);
    redraw(buttons, [deploy.state, deploy.kind], () => steering(deploy, line, refresh));
    extend(log, text || (over() ? "Nothing was logged." : "Nothing is logged yet."));
    return over() ? "done" : "";
  };
  if ((await refresh()) !== "done") follow(1000, signal, refresh);
  return [
    h("p", { class: "small" }, h("a", { href: "#/deploys" }, "All deploys")),
    heading(`Deploy of ${deploy.app}`, h("code", {}, deploy.id), state),
    details,
    buttons,
    line,
    card("Log", log),
  ];
}

// What can be done with the deploy in its state.
function steering({ id, app, kind, state }, line, refresh) {
  const at = (path) => `/account/${path.map(encodeURIComponent).join("/")}`;
  const steer = (label, tone, question, path, body) =>
    action(label, { class: tone, "data-focus": label }, line, async (button) => {
      if (!(await confirmed(...question, label))) return button.focus();
      const { deployId } = await call("POST", at(path), { body });
      if (deployId) location.hash = `#/deploys/${deployId}`;
      else await refresh();
    });
  if (CANCELABLE.includes(state)) {
    const question = ["Cancel this deploy?", "It ends without a release. What is served now stays."];
    return [steer("Cancel", "plain danger", question, ["deploys", id, "cancel"])];
  }
  if (state !== "live") return [];
  if (kind === "preview") {
    const question = [`Make this preview of ${app} live?`, "Its release is checked, and then replaces the live one."];
    return [steer("Promote", "main", question, ["deploys", id, "promote"])];
  }
  const question = [`Go back to this release of ${app}?`, "It is checked, and then replaces the live one."];
  return [steer("Roll back to this", "plain", question, ["apps", app, "rollback"], { deployId: id })];
}

function about(deploy) {
  const details = facts({
    Address: deploy.url && link(deploy.url, deploy.url.replace("https://", "")),
    Kind: capital(deploy.kind),
    Trigger: capital(deploy.trigger),
    Commit: deploy.commit && h("code", {}, deploy.commit.slice(0, 12)),
    Release: deploy.release && h("a", { href: `#/deploys/${deploy.release}` }, h("code", {}, deploy.release)),
    Queued: moment(deploy.createdAt),
    "Waits for": deploy.waitsFor && capital(deploy.waitsFor),
    Position: deploy.position,
    Took: deploy.durationMs !== undefined && duration(deploy.durationMs),
  });
  const error = deploy.error && h("p", { class: "refusal cut" }, capital(deploy.error));
  return error ? [phases(deploy), error, details] : [phases(deploy), details];
}

function phases({ kind, state, error }) {
  const names = Object.keys(PHASES).slice(0, kind === "preview" ? 2 : 3);
  const at = names.indexOf(state === "failed" ? error?.split(":")[0] : AT[state]);
  const progress = (n) => {
    if (state === "live" || n < at) return ["done", "good"];
    if (state === "canceled") return ["canceled", ""];
    if (n > at) return ["to come", ""];
    return state === "failed" ? ["failed", "bad"] : ["under way", "busy"];
  };
  const item = (name, n) => {
    const [word, tone] = progress(n);
    const spoken = h("span", { class: "unseen" }, `: ${word}`);
    return h("li", { class: tone ? null : "quiet" }, badge(PHASES[name], tone), spoken);
  };
  return h("ol", { class: "phases", "aria-label": "Phases" }, names.map(item));
}
