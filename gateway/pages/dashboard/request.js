// Shows the details of one request in the side sheet.

import { h } from "/pages/dom.js";
import { capital, count, duration, exact, money } from "/pages/format.js";
import { KINDS, kindOf } from "/pages/outcomes.js";
import { get, getIfThere } from "./api.js";
import { badge, facts, table } from "./parts.js";
import { keepQuery, readQuery } from "./query.js";
import { REASONS } from "./reasons.js";
import { openSheet } from "./sheet.js";

const MEANINGS = {
  APP_BACKEND_UNREACHABLE: "The app’s backend could not be reached to verify the token.",
  APP_CAP_REACHED: "The request could have exceeded the app’s daily spending cap.",
  APP_RATE_LIMITED: "The app made too many requests within a minute.",
  APP_SUSPENDED: "An operator had suspended the app or its account.",
  BACKBONE_UNAVAILABLE: "The service could not reach its database, or restarted.",
  CLIENT_GONE: "The client disconnected before the answer was complete.",
  INFERENCE_DISABLED: "Managed inference was off.",
  METHOD_NOT_ALLOWED: "The route does not accept this method.",
  MODEL_NOT_ALLOWED: "The model is not available.",
  MULTIMODAL_UNSUPPORTED: "The request contained more than text.",
  ORIGIN_NOT_ALLOWED: "The request came from a page that is not at one of the app’s addresses.",
  PROVIDER_ERROR: "The provider failed or ended the answer early.",
  PROVIDER_QUOTA_EXHAUSTED: "The provider’s quota or rate limit was exhausted.",
  PROVIDER_REFUSED: "The model rejected the request because it was too long or used an unsupported feature.",
  PROVIDER_TIMEOUT: "The provider took too long.",
  PROVIDER_UNREACHABLE: "The provider could not be reached.",
  REQUEST_MALFORMED: "The body was malformed.",
  REQUEST_TOO_LARGE: "The body was too large.",
  SPEND_CAP_REACHED: "The request could have exceeded the account’s daily spending cap.",
  TOKEN_INVALID: "The token is not valid for this app, or has expired.",
  TOKEN_MISSING: "The request carried no token.",
  TOKENS_LIMITED: "The app recently sent too many invalid tokens.",
  USER_CAP_REACHED: "The request could have exceeded the user’s daily spending cap.",
  USER_RATE_LIMITED: "A user of the app made too many requests within a minute.",
};

const LIMITS = {
  cap: "Account’s cap",
  dailyEuro: "App’s cap",
  userDailyEuro: "User’s cap",
  requestsPerMinute: "App’s requests per minute",
  userRequestsPerMinute: "User’s requests per minute",
};
// The view with the setting that decides: [codes, section of the app's settings, text].
const SETTINGS = [
  [/^(APP|USER)_(CAP_REACHED|RATE_LIMITED)$/, "limits", "Limits of"],
  [/^(TOKEN|TOKENS|APP_BACKEND)_/, "tokens", "Users’ tokens of"],
  [/^ORIGIN_/, "domain", "Domain of"],
];

// The address names the request while the sheet is open.
export async function openRequest(id, signal) {
  const request = await getIfThere(`/account/requests/${encodeURIComponent(id)}`, signal);
  if (!request) throw { status: 400, message: "None of the last 1,000 requests has this id." };
  const { app, code, status, reason, nanoEuro, reservedNanoEuro, ttftMs, durationMs, waitedMs, limits, region, attempts } = request;
  const [name, tone] = KINDS[kindOf(code)];
  const tokens = request.inputTokens || request.outputTokens;
  const { models } = code === "MODEL_NOT_ALLOWED" ? await get("/capabilities", signal) : {};
  const others = { ...readQuery(), id: "" };
  keepQuery({ ...others, id });
  const dialog = openSheet(
    "Request",
    h("p", {}, badge(capital(name), tone), status > 0 && ` · status ${status}`),
    code && h("p", {}, h("code", {}, code)),
    code && MEANINGS[code] && h("p", { class: "quiet" }, MEANINGS[code], models && ` Available: ${models.join(", ")}.`),
    reason && h("p", {}, `Token: ${REASONS[reason] ?? reason}`),
    settingLink(code, app),
    facts({
      Time: h("time", { datetime: request.at }, exact(request.at)),
      Id: h("code", {}, request.id),
      App: h("a", { href: `#/apps/${app}` }, app),
      Model: request.model || (models ? "None that the service knows, so its name is not kept" : "Unknown"),
      Tokens: tokens ? `${count(request.inputTokens)} in, ${count(request.outputTokens)} out` : "Not reported",
      Cost: money(nanoEuro),
      Reserved: money(reservedNanoEuro),
      Waited: duration(waitedMs),
      "First token": duration(ttftMs),
      Took: duration(durationMs),
      Region: region ?? "No provider was asked",
    }),
    limits.length > 0 && limitTable(limits),
    attempts.length > 1 && attemptTable(attempts),
  );
  dialog.addEventListener("close", () => readQuery().id === id && keepQuery(others));
}

function settingLink(code, app) {
  if (code === "SPEND_CAP_REACHED") return h("p", {}, h("a", { href: "#/account" }, "The account’s plan and cap"));
  const [, section, text] = SETTINGS.find(([codes]) => codes.test(code)) ?? [];
  return section && h("p", {}, h("a", { href: `#/apps/${app}/settings/${section}` }, `${text} ${app}`));
}

function attemptTable(attempts) {
  const columns = {
    Provider: ({ provider }) => provider,
    Outcome: ({ code }) => code || "Answered",
    Took: ({ durationMs }) => duration(durationMs),
  };
  return table("Attempts", columns, attempts, "");
}

function limitTable(limits) {
  const show = (name, value) => (name.includes("Per") ? count(value) : money(value));
  const columns = {
    "Limit in force": ({ name }) => LIMITS[name] ?? name,
    Used: ({ name, used }) => show(name, used),
    Limit: ({ name, limit }) => show(name, limit),
  };
  return table("Limits in force", columns, limits, "");
}
