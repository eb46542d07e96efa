// An app's settings, one section at a time.

import { h, showDialog } from "/pages/dom.js";
import { plural } from "/pages/format.js";
import { Refused, call, get } from "./api.js";
import { domainCard } from "./domain.js";
import { environmentCards } from "./environment.js";
import { hookCards } from "./hooks.js";
import { limitsCard } from "./limits.js";
import { action, announce, card, field, form, heading, refusal } from "./parts.js";
import { REASONS } from "./reasons.js";
import { may } from "./session.js";

export const title = "Settings";

const SAVE_DEADLINE = 15_000; // ms: the service may wait five seconds for the app's backend

const SECTIONS = {
  source: ["Source and build", (at, name, signal) => stored(at, signal, source)],
  tokens: ["Users’ tokens", (at, name, signal) => stored(at, signal, tokens)],
  environment: ["Environment", (at, name, signal) => environmentCards(at, signal)],
  domain: ["Custom domains", (at, name, signal) => domainCard(at, signal)],
  limits: ["Limits", (at, name, signal) => limitsCard(name, signal)],
  hooks: ["Deploy hooks", (at, name, signal) => hookCards(signal, name)],
  delete: ["Delete", (at, name) => deletion(at, name)],
};

export async function draw(signal, { app: name, section: chosen = "source" }) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  if (!(chosen in SECTIONS)) throw new Refused(404);
  const section = await SECTIONS[chosen][1](at, name, signal);
  const tab = ([key, [label]]) =>
    h("a", { href: `#/apps/${name}/settings/${key}`, "aria-current": key === chosen ? "page" : null }, label);
  return [
    heading(title, `Of ${name}.`),
    h("div", { class: "sections" }, h("nav", { "aria-label": "Settings" }, Object.entries(SECTIONS).map(tab)), h("div", { class: "view" }, section)),
  ];
}

// Draws a card from the app's settings, and again after they are saved.
async function stored(at, signal, cardOf) {
  const place = h("div", { class: "view" });
  const draw = (settings) => place.replaceChildren(cardOf(at, settings, draw));
  draw(await get(`${at}/settings`, signal));
  return place;
}

const input = (id, value, more = {}) =>
  h("input", { id, value: value ?? "", autocomplete: "off", spellcheck: "false", autocapitalize: "none", ...more });

async function save(at, body, draw, id) {
  document.querySelector(".saved")?.remove();
  const settings = await call("PATCH", at, { body, deadline: SAVE_DEADLINE });
  draw(settings);
  announce("Saved.");
  const button = document.getElementById(id);
  if (!button) return; // the user has left the view
  button.focus();
  button.closest("form").append(
    h("p", { class: "small quiet saved" }, "Saved. ", settings.authCheck && describeCheck(settings.authCheck, body.auth)),
  );
}

// Says whether users' tokens can be verified with what was saved.
function describeCheck({ ok, keys, algorithms, problem }, { kind }) {
  if (!ok) return h("span", { class: "refusal" }, `Tokens cannot be verified yet: ${problem}`);
  if (keys) return `The key set has ${plural(keys, "key")}: ${algorithms.join(", ")}.`;
  return kind === "backend" && "The backend answers, and refuses an invalid token.";
}

// -- users' tokens ----------------------------------------------------------------------------------------------

const KINDS = {
  jwks: "With a key set (JWKS)",
  secret: "With a shared secret",
  backend: "With a call to the app’s backend",
};

function tokens(at, { auth }, draw) {
  const kind = h(
    "select",
    { id: "kind" },
    Object.entries(KINDS).map(([value, text]) => h("option", { value, selected: value === auth.kind }, text)),
  );
  const address = input("auth-url", auth.url, { inputmode: "url" });
  const secret = input("auth-secret", "", { type: "password", autocomplete: "new-password", minlength: "32" });
  const issuer = input("issuer", auth.issuer);
  const audience = input("audience", [auth.audience ?? []].flat().join(", "));
  const claim = input("user-claim", auth.userClaim ?? auth.userField, { placeholder: "sub" });
  const url = field("URL of the key set", address);
  const key = field("Secret (at least 32 characters)", secret);
  const claims = [field("Issuer (optional)", issuer), field("Audience (optional)", audience)];
  const show = () => {
    toggle(url, kind.value !== "secret");
    toggle(key, kind.value === "secret");
    for (const each of claims) toggle(each, kind.value !== "backend");
    url.querySelector("label").textContent = kind.value === "backend" ? "URL of the backend" : "URL of the key set";
    address.placeholder = kind.value === "backend" ? "https://… or the app’s own /…" : "the app’s own /.well-known/jwks.json";
  };
  kind.addEventListener("change", show);
  show();
  const read = () => {
    const [aud, sub] = [list(audience.value), claim.value.trim() || null];
    const common = { issuer: issuer.value.trim() || null, audience: aud, userClaim: sub };
    if (kind.value === "jwks") return { kind: "jwks", url: address.value.trim(), ...common };
    if (kind.value === "secret") return { kind: "secret", secret: secret.value, ...common };
    const method = auth.kind === "backend" ? auth.method : undefined;
    return { kind: "backend", url: address.value.trim(), method, userField: sub };
  };
  const button = may("change_app") && h("button", { class: "main", id: "save-tokens", "aria-label": "Save users’ tokens" }, "Save");
  const fields = [field("Verification", kind), url, key, ...claims, field("Claim with the user’s id", claim)];
  return card(
    "Users’ tokens",
    h("p", { class: "quiet" }, "Each request to the model carries a token of one of your users. Changes apply immediately."),
    form("wide", fields, button, () => save(at, { auth: read() }, draw, "save-tokens")),
    may("check_token") && tokenCheck(at),
  );
}

// Checks a user's token, of which the service keeps nothing.
function tokenCheck(at) {
  const token = input("check-token", "", { required: true, "data-secret": true });
  const result = h("p", { class: "small quiet" });
  const button = h("button", { id: "check" }, "Check");
  const work = async () => {
    result.textContent = "";
    const body = { token: token.value.trim() };
    const { valid, reason, user } = await call("POST", `${at}/token-check`, { body, deadline: SAVE_DEADLINE });
    result.textContent = valid ? `Valid. The user is ${user}.` : `Not valid: ${REASONS[reason] ?? reason}.`;
    announce(result.textContent);
  };
  return [form("", [field("Check a token", token)], button, work), result];
}

// A browser must not validate hidden fields.
function toggle(part, shown) {
  part.hidden = !shown;
  part.querySelector("input").disabled = !shown;
}

function list(text) {
  const parts = text.split(",").map((part) => part.trim());
  return parts.length > 1 ? parts : parts[0] || null;
}

// -- source and build -------------------------------------------------------------------------------------------

function source(at, { repository, build }, draw) {
  const url = input("repository", repository?.url, { placeholder: "https://git.example.com/app.git", "data-secret": true });
  const branch = input("branch", repository?.branch, { placeholder: "the default branch" });
  const command = input("build-command", build?.command, { placeholder: "npm run build" });
  const output = input("output", build?.output, { placeholder: "dist" });
  const start = input("start", build?.start, { placeholder: "node server.js" });
  const health = input("health", build?.health, { placeholder: "/healthz" });
  const work = () => {
    const tracked = withoutEmpty({ url: url.value, branch: branch.value });
    const built = withoutEmpty({ command: command.value, output: output.value, start: start.value, health: health.value });
    return save(at, { repository: tracked?.url ? tracked : null, build: built }, draw, "save-source");
  };
  const button = may("change_app") && h("button", { class: "main", id: "save-source", "aria-label": "Save source and build" }, "Save");
  const fields = [
    field("Repository (optional)", url),
    field("Branch", branch),
    field("Build command", command),
    field("Folder to serve", output),
    field("Start command (for an app with a server)", start),
    field("Health check path (optional)", health),
  ];
  return card(
    "Source and build",
    h(
      "p",
      { class: "quiet" },
      "Changes apply from the next deploy. Without a repository, you publish the source yourself. Without a build command, " +
        "the source is served as it is. ",
      repository?.hasCredentials
        ? "The repository’s user name and password are stored."
        : "For a private repository, put the user name and password in the address: https://user:password@…",
    ),
    form("wide", fields, button, work),
  );
}

// Returns the fields without empty ones, or null if all are empty.
function withoutEmpty(fields) {
  const rest = Object.entries(fields).filter(([, value]) => value.trim());
  return rest.length ? Object.fromEntries(rest.map(([name, value]) => [name, value.trim()])) : null;
}

// -- deletion ---------------------------------------------------------------------------------------------------

function deletion(at, name) {
  if (!may("delete_app")) return card("Delete", h("p", { class: "quiet" }, "Only owners of the account may delete the app."));
  const line = refusal();
  const button = action("Delete the app", { class: "danger" }, line, async (button) => {
    if (!(await confirmByName(name))) return button.focus();
    await call("DELETE", at);
    announce(`Deleted the app ${name}.`);
    return "#/";
  });
  return card(
    "Delete",
    h("p", { class: "quiet" }, "Deletes the app’s pages, hooks, variables and sources. This cannot be undone."),
    h("div", { class: "row" }, button),
    line,
  );
}

// Asks the user to type the app's name. Resolves with whether it was typed.
async function confirmByName(name) {
  const typed = input("typed-name", "", { required: true, autofocus: true, "aria-describedby": "loss" });
  const lose = h("button", { value: "yes", class: "danger", "aria-disabled": "true" }, "Delete it");
  typed.addEventListener("input", () => lose.setAttribute("aria-disabled", String(typed.value !== name)));
  const keep = h("button", { type: "button", onclick: () => dialog.close("") }, "Keep it");
  const ask = h(
    "form",
    { method: "dialog", onsubmit: (event) => typed.value !== name && event.preventDefault() },
    h("h2", { id: "question" }, `Delete ${name}?`),
    h("p", { id: "loss", class: "quiet" }, "Visitors to its address will get an error. Deploys in progress stop."),
    field(`To confirm, type ${name}`, typed),
    h("div", { class: "row" }, keep, lose),
  );
  const dialog = h("dialog", { "aria-labelledby": "question" }, ask);
  return (await showDialog(dialog)) === "yes";
}
