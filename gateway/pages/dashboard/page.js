// The dashboard: logs in and out, switches between views, and reports failures.

import { keepCurrent } from "/pages/format.js";
import { h, pause, untilVisible } from "/pages/dom.js";
import { call, get } from "./api.js";
import * as account from "./account.js";
import { showAccounts } from "./accounts.js";
import * as app from "./app.js";
import * as data from "./data.js";
import { watchSpend } from "./banner.js";
import * as delivery from "./delivery.js";
import * as deploy from "./deploy.js";
import * as deploys from "./deploys.js";
import { keepDraft, loadDraft, restoreDraft } from "./drafts.js";
import * as hooks from "./hooks.js";
import { showLogIn } from "./login.js";
import * as newApp from "./new-app.js";
import * as overview from "./overview.js";
import { openSwitch, showNavigation, watchApps } from "./navigation.js";
import { announce, explain, failure, mayLeave, warning } from "./parts.js";
import * as requests from "./requests.js";
import { currentSession, readSession } from "./session.js";
import * as settings from "./settings.js";
import * as tryIt from "./try.js";
import * as usage from "./usage.js";
import { views, watchSkipLink } from "./views.js";
import * as webhooks from "./webhooks.js";

const main = document.querySelector("main");
const bar = document.querySelector(".top");

const ROUTES = [
  [/^\/?$/, overview],
  [/^\/webhooks$/, webhooks],
  [/^\/webhooks\/(?<id>[\w-]+)$/, delivery],
  [/^\/hooks$/, hooks],
  [/^\/deploys$/, deploys],
  [/^\/deploys\/(?<id>[\w-]+)$/, deploy],
  [/^\/apps\/(?<app>[\w-]+)$/, app],
  [/^\/apps\/(?<app>[\w-]+)\/deploys$/, deploys],
  [/^\/apps\/(?<app>[\w-]+)\/requests$/, requests],
  [/^\/apps\/(?<app>[\w-]+)\/usage$/, usage],
  [/^\/apps\/(?<app>[\w-]+)\/data$/, data],
  [/^\/apps\/(?<app>[\w-]+)\/try$/, tryIt],
  [/^\/apps\/(?<app>[\w-]+)\/settings(?:\/(?<section>[\w-]+))?$/, settings],
  [/^\/usage$/, usage],
  [/^\/requests$/, requests],
  [/^\/new-app$/, newApp],
  [/^\/account$/, account],
];

const OUTAGES = [0, 502, 503, 504]; // statuses that end by themselves
const RETRY = 5_000; // ms

let inside = false;
let session = new AbortController();

const { leave, show } = views({
  routes: ROUTES,
  place: main,
  product: "Capsule",
  put: (drawn) => main.replaceChildren(h("div", { class: "view" }, drawn)),
  before: (path) => showNavigation(bar, path),
  after: (view) => {
    if (!view.titled) document.title = `${main.querySelector("h1").textContent} · Capsule`;
    if (restoreDraft()) announce("What you had typed is there again.");
  },
  fail: (error) => fail(error),
});

let asking = false;

async function navigate({ oldURL }) {
  if (!inside || asking) return;
  asking = true;
  const leaves = await mayLeave();
  asking = false;
  if (leaves) await show();
  else history.replaceState(null, "", oldURL);
}

function fail(error, again = () => show()) {
  if (error.status === 401) return endSession();
  if (error.code === "ACCOUNT_NOT_CHOSEN" && inside) return enter(); // an operator was removed from the account
  const signal = leave(); // a part of the view may have begun to follow changes
  main.replaceChildren(h("div", { class: "view" }, failure(error, again)));
  main.querySelector("h1").focus();
  if (error.status === undefined) reportError(error); // a bug in this page
  if (OUTAGES.includes(error.status)) recover(again, signal);
}

// Draws the view as soon as the service answers again, unless the user has left it.
async function recover(again, signal) {
  const answers = () => get("/account", signal).then(() => true, ({ status }) => !OUTAGES.includes(status));
  try {
    do {
      await pause(RETRY, signal);
      await untilVisible(signal);
    } while (!(await answers()));
  } catch {
    return; // another view is open
  }
  if (!signal.aborted) again({ focus: main.contains(document.activeElement) });
}

function logIn(why = "") {
  leave();
  session.abort();
  inside = false;
  bar.hidden = true;
  document.title = "Log in · Capsule";
  showLogIn(main, why, enter);
}

function endSession() {
  if (!inside) return; // several calls can find that it has ended
  keepDraft();
  logIn("Your session has ended.");
}

function choose(session) {
  leave();
  inside = false;
  bar.hidden = true;
  document.title = "Choose an account · Capsule";
  showAccounts(main, session, enter);
}

async function enter({ focus = true } = {}) {
  try {
    const session = await readSession();
    if (!session.account) return choose(session);
    const { name } = await get("/account");
    document.querySelector("#account").textContent = name;
  } catch (error) {
    return error.status === 401 ? logIn() : fail(error, enter);
  }
  inside = true;
  bar.hidden = false;
  session.abort();
  session = new AbortController();
  watchApps(session.signal);
  watchSpend(session.signal);
  await show({ focus });
}

document.querySelector("#log-out").addEventListener("click", async () => {
  if (!(await mayLeave())) return;
  try {
    await call("DELETE", "/dashboard/session");
  } catch (error) {
    return main.firstElementChild.prepend(warning(`You are still logged in. ${explain(error)[1]}`));
  }
  history.replaceState(null, "", location.pathname);
  logIn("You are logged out.");
});

addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || bar.hidden) return;
  event.preventDefault();
  openSwitch();
});

watchSkipLink(main);
addEventListener("choose-account", () => choose(currentSession()));
addEventListener("account-changed", () => enter());
addEventListener("session-ended", endSession);
addEventListener("hashchange", navigate);
setInterval(keepCurrent, 20_000);
loadDraft();
enter({ focus: false });
