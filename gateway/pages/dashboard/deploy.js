// Shows one deploy and follows its log.

import { h, link } from "/pages/dom.js";
import { capital, duration, moment } from "/pages/format.js";
import { get } from "./api.js";
import { stateOf } from "./deploys.js";
import { announce, badge, card, facts, follow, heading, redraw } from "./parts.js";

export const title = "Deploy";

const OVER = ["live", "failed"];
const PHASES = { build: "Build", health: "Health check", canary: "Canary" };
const AT = { building: "build", checking: "health", canary: "canary" };

export async function draw(signal, id) {
  const log = h("pre", { class: "log", role: "log", tabindex: "0", "aria-label": "Build log" });
  const [state, details] = [h("div"), h("section", { class: "card" })];
  let deploy;
  const over = () => OVER.includes(deploy.state);
  const refresh = async () => {
    const before = deploy?.state;
    const { log: text, ...rest } = await get(`/account/deploys/${encodeURIComponent(id)}`, signal);
    deploy = rest;
    if (before && before !== deploy.state) announce(`The deploy is ${deploy.state}.`);
    redraw(state, deploy, stateOf);
    redraw(details, deploy, about);
    extend(log, text || (over() ? "Nothing was logged." : "Nothing is logged yet."));
    return over() ? "done" : "";
  };
  if ((await refresh()) !== "done") follow(1000, signal, refresh);
  return [
    h("p", { class: "small" }, h("a", { href: "#/deploys" }, "All deploys")),
    heading(`Deploy of ${deploy.app}`, h("code", {}, deploy.id), state),
    details,
    card("Log", log),
  ];
}

function about(deploy) {
  const details = facts({
    Address: deploy.url && link(deploy.url, deploy.url.replace("https://", "")),
    Kind: capital(deploy.kind),
    Trigger: capital(deploy.trigger),
    Commit: deploy.commit && h("code", {}, deploy.commit.slice(0, 12)),
    Queued: moment(deploy.createdAt),
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

// Appends only the new text, which keeps a selection. A log that is scrolled to its end stays there.
function extend(log, text) {
  const before = log.textContent;
  if (text === before) return;
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
  if (before && text.startsWith(before)) log.append(text.slice(before.length));
  else log.textContent = text;
  if (atEnd) log.scrollTop = log.scrollHeight;
}
