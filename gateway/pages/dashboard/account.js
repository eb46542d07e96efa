// Shows the account: its plan, its members and its API keys, which are created and revoked here.

import { h } from "/pages/dom.js";
import { capital, count, moment, money, size } from "/pages/format.js";
import { call, get } from "./api.js";
import { searchable } from "./app_search.js";
import { invitationCard } from "./invitations.js";
import { memberCard } from "./members.js";
import { action, announce, card, confirmAction, empty, facts, field, form, heading, offer, redraw, refusal, run, sessionEnded, showOnce, table } from "./parts.js";
import { currentSession, may } from "./session.js";

export const title = "Account";

const CHANGES = 15; // that are shown at first, and with each further step

export async function draw(signal) {
  const list = h("div", { class: "stack" });
  const created = h("div", { class: "view" });
  const [trail, showChanges] = changeTrail(signal);
  const refresh = async () => {
    const [keys] = await Promise.all([get("/account/keys", signal), showChanges()]);
    redraw(list, keys, (rows) => keyTable(rows, refresh));
  };
  const members = memberCard(signal, () => refresh());
  const [account, apps] = await Promise.all([get("/account", signal), get("/account/apps", signal), refresh()]);
  const shown = h("span", {}, account.name);
  return [
    heading(title, "Its plan and limits, its members, and the API keys of its programs."),
    card(null, facts({ Name: shown, Id: h("code", {}, account.id), Plan: capital(account.plan) })),
    may("rename_account") && card("Rename", nameForm(account, shown, refresh)),
    sessionCard(),
    invitationCard(),
    await members,
    card("Limits", limits(account)),
    may("create_key") && card("New API key", keyForm(apps, created, refresh)),
    created,
    card("API keys", list),
    account.notices && card("Notices by e-mail", noticesForm(await get("/account/notices", signal), refresh)),
    card("Changes", trail),
    may("leave") && card(account.deletesAt ? "Keep the account" : "Delete the account", leavingForm(account)),
  ];
}

// Who is logged in. The same person or key may have sessions in other browsers.
function sessionCard() {
  const { email, role, accounts } = currentSession();
  const line = refusal();
  const everywhere = action("Log out everywhere", { class: "danger" }, line, async (button) => {
    const loss = email ? `All sessions of ${email} end.` : "All sessions that began with the same API key end.";
    if (!(await confirmAction("Log out everywhere?", loss, "Log out", { keep: "Stay" }))) return button.focus();
    await call("DELETE", "/dashboard/session?everywhere=true");
    sessionEnded();
  });
  const others = accounts.length > 1 && h("button", { type: "button", onclick: () => dispatchEvent(new Event("choose-account")) }, "Switch account");
  const who = email ? facts({ "Signed in as": email, Role: capital(role) }) : h("p", { class: "quiet" }, "An API key began this session.");
  return card("Your session", who, h("div", { class: "row" }, others, everywhere), line);
}

function nameForm(account, shown, refresh) {
  const name = h("input", { id: "account-name", required: true, maxlength: "200", autocomplete: "organization", value: account.name });
  const save = async () => {
    const renamed = await call("PATCH", "/account", { body: { name: name.value.trim() } });
    document.querySelector("#account").textContent = shown.textContent = renamed.name;
    saved.textContent = "Saved.";
    announce("Saved the name.");
    await refresh();
  };
  const saved = h("p", { class: "small quiet" });
  return [form("with-button", [field("Account name", name)], h("button", {}, "Save"), save), saved];
}

function limits({ spend, limits, deploysToday, storage }) {
  return facts({
    "Spending per day": money(spend.cap),
    "Deploys today": `${count(deploysToday)} of ${count(limits.deploysPerDay)}`,
    "Requests per app": `${count(limits.requestsPerMinutePerApp)} per minute`,
    "Requests per user": `${count(limits.requestsPerMinutePerUser)} per minute`,
    "Stored deliveries": `${size(storage.bytes)} of ${size(storage.limit)}`,
    "Request size": `up to ${Math.round(limits.maxRequestBytes / 1024)} KB`,
    "Answer length": `up to ${count(limits.maxOutputTokens)} tokens`,
  });
}

// What a key of each scope may do.
const SCOPES = { full: "Everything", deploy: "Publish and follow deploys", read: "Read" };

function keyForm(apps, created, refresh) {
  const name = h("input", { id: "key-name", required: true, maxlength: "100", autocomplete: "off", placeholder: "e.g. laptop" });
  const options = Object.entries(SCOPES).map(([value, text]) => h("option", { value }, text));
  const scope = h("select", { id: "key-scope", onchange: () => limit() }, options);
  const names = apps.map(({ name }) => h("option", { value: name }, name));
  const app = searchable(h("select", { id: "key-app", disabled: true }, h("option", { value: "" }, "All apps"), names));
  const limit = () => {
    app.disabled = scope.value === "full";
    if (app.disabled) app.value = "";
  };
  const create = async () => {
    const body = { name: name.value.trim(), scope: scope.value, app: app.value || null };
    const { key, name: label } = await call("POST", "/account/keys", { body });
    name.value = "";
    const right = scope.value === "full" ? "It gives full access to the account." : `It may: ${describeScope(body)}.`;
    created.prepend(showOnce(`The key “${label}”`, `It is shown only once. ${right}`, key));
    announce("Created the key.");
    await refresh();
  };
  const fields = [field("Name", name), field("May do", scope), field("With", app)];
  return form("with-button three", fields, h("button", { class: "main" }, "Create"), create);
}

const describeScope = ({ scope, app }) => (app ? `${SCOPES[scope]}, only ${app}` : SCOPES[scope]);

function keyTable(keys, refresh) {
  const line = refusal();
  const revoke = ({ id, name }) => {
    const named = { class: "plain danger", "data-focus": id, "aria-label": `Revoke ${name}` };
    return action("Revoke", named, line, async (button) => {
      const loss = "Programs that use it get 401 at once, and the dashboard sessions that began with it end.";
      if (!(await confirmAction(`Revoke ${name}?`, loss, "Revoke"))) return button.focus();
      await call("DELETE", `/account/keys/${encodeURIComponent(id)}`);
      announce(`Revoked ${name}.`);
      await refresh();
    });
  };
  const columns = {
    Name: ({ name }) => name,
    Id: ({ id }) => h("code", {}, id),
    "May do": describeScope,
    Created: ({ createdAt, by }) => [moment(createdAt), by && h("span", { class: "quiet" }, ` by ${by}`)],
    "Last used": ({ lastUsedAt }) => (lastUsedAt ? moment(lastUsedAt) : h("span", { class: "quiet" }, "Never")),
    ...(may("revoke_key") && { "": revoke }),
  };
  return [table("API keys", columns, keys), line];
}

const NOTICES = {
  budget: "80% and 100% of a daily cap, of the account or an app",
  deployFailed: "A deploy fails",
  appDown: "An app does not answer, and answers again",
  certificate: "The certificate of a custom domain ends within a week",
  finding: "A scan has new red security findings",
};

// Lets the signed-in person choose their notices.
function noticesForm(choices, refresh) {
  const boxes = Object.keys(NOTICES).map((kind) => h("input", { type: "checkbox", id: `notice-${kind}`, name: kind, checked: choices[kind] }));
  const lines = Object.values(NOTICES).map((text, n) => h("label", { class: "choice" }, boxes[n], text));
  const saved = h("p", { class: "small quiet" });
  const save = async () => {
    saved.textContent = "";
    await call("PUT", "/account/notices", { body: Object.fromEntries(boxes.map(({ name, checked }) => [name, checked])) });
    saved.textContent = "Saved.";
    announce("Saved your notices.");
    await refresh();
  };
  const text = h("p", { class: "quiet" }, "For you alone, to the address with which you signed in. At most 20 per day, and 10 of this account.");
  return [text, form("choices", lines, h("button", {}, "Save the notices"), save), saved];
}

// The account's audit trail, with filters for what was done and by whom, and a button for older changes. Returns an element
// and a function that brings it up to date.
function changeTrail(signal) {
  const [list, line] = [h("div", { class: "stack" }), refusal()];
  const filter = (id, all) => h("select", { id, "aria-label": all, onchange: () => run(line, refresh) }, h("option", { value: "" }, all));
  const [kind, actor] = [filter("change-action", "All changes"), filter("change-actor", "By anybody")];
  const fetchChanges = (before = "") => {
    const query = { limit: CHANGES, action: kind.value, actor: actor.value, before };
    return get(`/account/audit?${new URLSearchParams(Object.entries(query).filter(([, value]) => value))}`, signal);
  };
  const show = (changes, more) => {
    offer(kind, changes.map(({ action }) => action), words);
    offer(actor, changes.map(({ who }) => who));
    const none = empty("No changes yet", "What keys, sessions and operators change appears here.");
    const older = action("Older", { "data-focus": "older" }, line, async () => {
      const next = await fetchChanges(changes.at(-1).id);
      show([...changes, ...next], next.length === CHANGES);
    });
    redraw(list, [changes, more], () => [changes.length ? table("Changes", CHANGE, changes, "compact changes") : none, more && older]);
  };
  const refresh = async () => {
    const changes = await fetchChanges();
    show(changes, changes.length === CHANGES);
  };
  return [[h("div", { class: "row" }, kind, actor), list, line], refresh];
}

const words = (action) => capital(action.replaceAll("_", " "));

const CHANGE = {
  Action: ({ action, count }) => [words(action), count > 1 ? h("span", { class: "quiet" }, `, ${count} times`) : ""],
  Target: ({ target }) => (target ? h("code", {}, target) : ""),
  By: ({ who, by }) => [who, ["key", who].includes(by) ? "" : h("span", { class: "quiet" }, `, ${by}`)],
  When: ({ at }) => moment(at),
};

function leavingForm({ name, deletesAt }) {
  const line = refusal();
  if (deletesAt) {
    const keep = async () => {
      await call("DELETE", "/account/deletion");
      location.reload();
    };
    const text = ["Everything is deleted ", moment(deletesAt), ". Until then, you can bring it back as it was."];
    return [h("p", {}, text), h("div", { class: "row" }, action("Keep the account", { class: "main" }, line, keep)), line];
  }
  const typed = h("input", { id: "leaving-name", required: true, autocomplete: "off" });
  const loss = "All apps stop at once. After the grace, they are deleted with their data, keys and logs.";
  const leave = async () => {
    if (!(await confirmAction(`Delete ${name}?`, loss, "Delete the account"))) return;
    await call("POST", "/account/deletion", { body: { name: typed.value } });
    location.reload();
  };
  const button = h("button", { class: "danger" }, "Delete");
  return [h("p", { class: "quiet" }, loss), form("with-button", [field(`Type “${name}” to confirm`, typed)], button, leave)];
}
