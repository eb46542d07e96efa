// Lists the latest requests to the account's apps, with their times and their errors by code.

import { h } from "/pages/dom.js";
import { count, duration, moment, money } from "/pages/format.js";
import { get } from "./api.js";
import { badge, card, empty, field, follow, heading, redraw, table } from "./parts.js";
import { REASONS } from "./reasons.js";

export const title = "Requests";

const PAGE = 50; // rows
const PERCENTILES = [50, 95, 99];
const OUTCOMES = { answered: "Answered", interrupted: "Interrupted", refused: "Refused" };
const TONES = { answered: "good", interrupted: "warn", refused: "bad" };
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

// The same outcomes as the API's filter `outcome`.
const outcomeOf = ({ code, nanoEuro }) =>
  !code ? "answered" : nanoEuro || code === "CLIENT_GONE" ? "interrupted" : "refused";

export async function draw(signal) {
  const [app, model, outcome] = ["app", "model", "outcome"].map((id) => h("select", { id }));
  const [times, errors, list] = [h("div"), h("div"), h("div", { class: "stack" })];
  let rows = [];
  let shown = PAGE;
  const show = () => {
    offer(app, "All apps", rows.map((row) => row.app));
    offer(model, "All models", rows.map((row) => row.model).filter(Boolean));
    const chosen = rows.filter(
      (row) =>
        (!app.value || row.app === app.value) &&
        (!model.value || row.model === model.value) &&
        (!outcome.value || outcomeOf(row) === outcome.value),
    );
    redraw(times, chosen, percentiles);
    redraw(errors, chosen, byCode);
    redraw(list, [chosen, shown, rows.length], () => [
      requestTable(chosen.slice(0, shown), rows.length > 0),
      chosen.length > shown && h("button", { type: "button", "data-focus": "more", onclick: showMore }, "Show more"),
    ]);
  };
  const showMore = () => {
    shown += PAGE;
    show();
  };
  const refresh = async () => {
    rows = await get("/account/requests?limit=1000", signal);
    show();
  };
  offer(outcome, "All outcomes", Object.keys(OUTCOMES), OUTCOMES);
  for (const filter of [app, model, outcome]) {
    filter.addEventListener("change", () => {
      shown = PAGE;
      show();
    });
  }
  await refresh();
  follow(5_000, signal, refresh);
  return [
    heading("Requests", "The last 1,000 requests to your apps. Contents and users are not recorded."),
    h("div", { class: "fields" }, field("App", app), field("Model", model), field("Outcome", outcome)),
    h("div", { class: "pair" }, card("Times", times), card("Errors by code", errors)),
    card("Newest first", list),
  ];
}

// Adds the missing options to the select, and keeps its choice.
function offer(select, all, values, names = {}) {
  const there = new Set([...select.options].map(({ value }) => value));
  if (!there.size) select.append(h("option", { value: "" }, all));
  for (const value of new Set(values).difference(there)) select.append(h("option", { value }, names[value] ?? value));
}

function percentiles(rows) {
  const times = {
    "First token": rows.filter(({ ttftMs }) => ttftMs !== null).map(({ ttftMs }) => ttftMs),
    "Full answer": rows.filter(({ code }) => !code).map(({ durationMs }) => durationMs),
  };
  const lines = Object.entries(times).filter(([, its]) => its.length);
  if (!lines.length) return empty("Nothing to measure", "None of these requests was answered.");
  const columns = { Time: ([name]) => name };
  for (const p of PERCENTILES) columns[`p${p}`] = ([, its]) => duration(rank(its, p));
  columns.Answers = ([, its]) => count(its.length);
  return [
    table("Percentiles", columns, lines),
    h("p", { class: "small quiet below" }, "95% of answers took no longer than p95. Only streams have a first token."),
  ];
}

// Returns the nearest rank: the smallest time that p percent of the times do not exceed.
const rank = (times, p) => times.toSorted((a, b) => a - b)[Math.ceil((p / 100) * times.length) - 1];

function byCode(rows) {
  const codes = [...Map.groupBy(rows.filter(({ code }) => code), ({ code }) => code)];
  if (!codes.length) return empty("No errors", rows.length ? "All of these requests were answered." : "");
  const columns = {
    Code: ([code]) => [h("code", {}, code), small(MEANINGS[code])],
    Requests: ([, its]) => count(its.length),
  };
  return table("Errors by code", columns, codes.sort(([, a], [, b]) => b.length - a.length));
}

function requestTable(rows, any) {
  if (!any) return empty("No requests yet", "Requests to your apps appear here a few seconds after they end.");
  if (!rows.length) return empty("No such requests", "None of the last 1,000 requests matches these filters.");
  const columns = {
    Request: ({ at, id }) => [moment(at), small(h("code", {}, id))],
    App: ({ app, model }) => [app, small(model)],
    Outcome: outcomeCell,
    Tokens: tokens,
    Cost: ({ nanoEuro }) => h("span", { class: "whole" }, money(nanoEuro)),
    "First token": ({ ttftMs }) => h("span", { class: "whole" }, duration(ttftMs)),
    Took: ({ durationMs }) => h("span", { class: "whole" }, duration(durationMs)),
  };
  return table("Requests", columns, rows);
}

const small = (content) => content && h("span", { class: "small quiet" }, content);

function outcomeCell({ status, ...row }) {
  const outcome = outcomeOf(row);
  const details = [status && `status ${status}`, row.code].filter(Boolean).join(", ");
  const reason = row.reason && small(`Token: ${REASONS[row.reason] ?? row.reason}`);
  return [badge(OUTCOMES[outcome], TONES[outcome]), small(details), reason];
}

function tokens({ inputTokens, outputTokens, nanoEuro }) {
  if (inputTokens || outputTokens) return `${count(inputTokens)} in, ${count(outputTokens)} out`;
  return nanoEuro ? "Not reported" : "–";
}
