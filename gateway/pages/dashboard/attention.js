// The strip "Needs attention" of the overview: what is wrong with the account's apps now, and what to do about it.

import { h } from "/pages/dom.js";
import { count, money, plural, sentence } from "/pages/format.js";
import { get } from "./api.js";
import { badge, redraw } from "./parts.js";

const DEPLOYS = 50; // the newest
const REFUSALS = 100; // the newest of each code
const RECENT = 3_600_000; // ms in which a refused token counts
const NEAR = 0.8; // of a cap
const SHOWN = 5; // items that are not folded
const NAMED = 3; // apps that an item names

const TONES = { bad: "Problem", warn: "Warning" };
const STATUS = {
  disabled: "The operators have turned managed inference off. Requests to the model get 503 until they turn it on.",
  misconfigured: "The service cannot use its model provider. Only its operators can fix this.",
  "quota-exhausted": "The quota of the model provider is exhausted. Requests fail until it is renewed.",
  "provider-unreachable": "The model provider cannot be reached. Requests fail until it answers.",
};

// Returns the strip of all apps or of one, and a function that brings it up to date and resolves with the names of the apps
// that have a problem. `changed` has the topics that may have changed; the function reads the logs only if they did.
//
// A problem is { tone, name, says, text, href, act }: `says` turns the name of an app, or words for several, into a title.
// Without an app there is no name.
export function attentionStrip(signal, app) {
  const only = app ? `&app=${app}` : "";
  const strip = h("section", { class: "card attention", "aria-labelledby": "attention", hidden: true });
  const paths = [
    `/account/deploys?limit=${DEPLOYS}${only}`,
    `/account/requests?code=APP_CAP_REACHED&limit=${REFUSALS}${only}`,
    `/account/requests?code=TOKEN_INVALID&limit=${REFUSALS}${only}`,
  ];
  let logs;
  const refresh = async (account, capabilities, apps, changed) => {
    if (changed.has("deploys") || changed.has("requests")) logs = await Promise.all(paths.map((path) => get(path, signal)));
    const [deploys, capped, tokens] = logs;
    const names = new Set(apps.map(({ name }) => name));
    const problems = [
      ...findStatus(capabilities),
      ...(await findCapped(capped, account.spend.day, names, signal)),
      ...apps.filter(({ health }) => health === "unhealthy").map(describeOutage),
      ...findFailed(deploys, names),
      ...findTokens(tokens, names),
    ];
    strip.hidden = !problems.length;
    redraw(strip, problems, () => [h("h2", { id: "attention" }, "Needs attention"), list(problems)]);
    return new Set(problems.flatMap(({ name }) => name ?? []));
  };
  return [strip, refresh];
}

// Apps with the same problem are one item.
function list(problems) {
  const items = [...Map.groupBy(problems, ({ tone, says, text }) => [tone, says(""), text].join()).values()].map(item);
  const rest = items.slice(SHOWN);
  return [
    h("ul", { class: "problems" }, items.slice(0, SHOWN)),
    rest.length > 0 && h("details", {}, h("summary", {}, `And ${count(rest.length)} more`), h("ul", { class: "problems" }, rest)),
  ];
}

function item(problems) {
  const [{ tone, name, says, text, href, act }] = problems;
  const many = problems.length > 1;
  const link = (words, to) => h("a", { href: to, "data-focus": `${words} ${to}` }, words);
  const named = problems.slice(0, NAMED).map((its, n) => [n > 0 && ", ", link(its.name, its.href)]);
  const rest = problems.length - NAMED;
  return h(
    "li",
    {},
    h("div", { class: "row" }, badge(TONES[tone], tone), h("h3", {}, says(many ? plural(problems.length, "app") : name, many))),
    h("p", { class: "small" }, text, " ", many ? [named, rest > 0 && ` and ${count(rest)} more`] : href && link(act, href)),
  );
}

function findStatus({ managedInferenceStatus: status }) {
  const what = status === "disabled" ? "Inference is off" : "Inference fails";
  return status in STATUS ? [{ tone: "bad", says: () => what, text: STATUS[status] }] : [];
}

// An app is over its cap if requests of today were refused, and it still has no room or the refusal is recent.
async function findCapped(rows, day, names, signal) {
  const found = [];
  for (const [name, its] of Map.groupBy(rows.filter(({ at, app }) => at >= day && names.has(app)), ({ app }) => app)) {
    const { settled, reserved, cap } = await get(`/account/apps/${encodeURIComponent(name)}/spend`, signal);
    if (settled + reserved < NEAR * cap && !isRecent(its[0])) continue;
    const held = reserved ? ` Running requests reserve ${money(reserved)}; what they do not use becomes free when they end.` : "";
    found.push({
      tone: "warn",
      name,
      says: (who, many) => `${who} ${many ? "have reached their limits" : "has reached its limit"}`,
      text: `${plural(its.length, "request")} got 402 today: ${money(settled)} of ${money(cap)} is spent.${held}`,
      href: `#/apps/${name}/settings/limits`,
      act: "Change the limit",
    });
  }
  return found;
}

const describeOutage = ({ name }) => ({
  tone: "bad",
  name,
  says: (who, many) => `${who} ${many ? "are" : "is"} unhealthy`,
  text: "It does not answer the probes of the service.",
  href: `#/apps/${name}`,
  act: "See its output and deploys",
});

// The newest live deploy of each app decides.
function findFailed(deploys, names) {
  const live = deploys.filter(({ kind, app }) => kind === "live" && names.has(app));
  return [...Map.groupBy(live, ({ app }) => app)]
    .filter(([, [newest]]) => newest.state === "failed")
    .map(([name, [{ id, error }]]) => ({
      tone: "bad",
      name,
      says: (who) => `The last deploy of ${who} failed`,
      text: sentence(error ?? "The reason is unknown."),
      href: `#/deploys/${id}`,
      act: "See the log",
    }));
}

function findTokens(rows, names) {
  const recent = rows.filter((row) => isRecent(row) && names.has(row.app));
  return [...Map.groupBy(recent, ({ app }) => app)].map(([name, its]) => ({
    tone: "warn",
    name,
    says: (who, many) => `${who} ${many ? "get" : "gets"} invalid tokens`,
    text: `${plural(its.length, "request")} of the last hour got 401 TOKEN_INVALID. Compare the app’s tokens with its settings.`,
    href: `#/apps/${name}/settings/tokens`,
    act: "Check how tokens are verified",
  }));
}

const isRecent = ({ at }) => Date.now() - Date.parse(at) < RECENT;
