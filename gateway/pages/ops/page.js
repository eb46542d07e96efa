// The operators' page: logs in and out, and switches between views.

import { keepCurrent } from "/pages/format.js";
import { call, get } from "/dashboard/api.js";
import { announce, failure, markCurrent } from "/dashboard/parts.js";
import { preferSignIn } from "/dashboard/session.js";
import { views, watchSkipLink } from "/dashboard/views.js";
import * as account from "./account.js";
import * as accounts from "./accounts.js";
import * as app from "./app.js";
import * as apps from "./apps.js";
import * as audit from "./audit.js";
import * as deploys from "./deploys.js";
import { drawLast, openStream, showTrouble, stopStream } from "./live.js";
import * as overview from "./overview.js";
import * as spending from "./spending.js";
import * as system from "./system.js";
import { explain } from "./words.js";

const bar = document.querySelector(".top");
const main = document.querySelector("main");
const place = document.querySelector("#view");

const ROUTES = [
  [/^\/?$/, overview],
  [/^\/accounts$/, accounts],
  [/^\/accounts\/(?<id>[\w-]+)$/, account],
  [/^\/apps$/, apps],
  [/^\/apps\/(?<id>[\w-]+)$/, app],
  [/^\/deploys$/, deploys],
  [/^\/spending$/, spending],
  [/^\/system$/, system],
  [/^\/audit$/, audit],
];

let inside = false;

const { leave, show } = views({
  routes: ROUTES,
  place,
  put,
  product: "Capsule operations",
  before: (path) => markCurrent(bar, path),
  after: (view) => view.live && drawLast(),
  fail,
});

function put(drawn) {
  place.classList.remove("waiting");
  place.replaceChildren(...[drawn].flat(Infinity).filter(Boolean));
}

function fail(error) {
  if (error.status === 401) return logIn("Your session has ended.");
  put(failure(error, () => show()));
  place.querySelector("h1").focus();
  if (error.status === undefined) reportError(error); // a bug in this page
}

// -- logging in --------------------------------------------------------------------------------------------------

function logIn(why = "") {
  leave();
  stopStream();
  inside = false;
  bar.hidden = true;
  showTrouble("");
  document.title = "Log in · Capsule operations";
  put([...document.querySelector("#log-in").content.cloneNode(true).children]);
  const form = place.querySelector("form");
  const [token, button, refusal] = ["#token", "button", "#refusal"].map((name) => form.querySelector(name));
  const signIn = preferSignIn(form);
  const lead = form.querySelector("#why");
  lead.textContent = why || (signIn ? "" : "Use the operator token.");
  lead.hidden = !lead.textContent;
  const refuse = (text) => {
    refusal.textContent = text;
    token.setAttribute("aria-invalid", "true");
    token.focus();
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    if (!token.value.trim()) return refuse("Paste the operator token.");
    button.disabled = true;
    refusal.textContent = "";
    token.removeAttribute("aria-invalid");
    try {
      await call("POST", "/ops/session", { body: { token: token.value.trim() } });
    } catch (error) {
      button.disabled = false;
      return refuse(explain(error));
    }
    enter();
  });
  (signIn ?? token).focus();
}

async function enter({ focus = true } = {}) {
  inside = true;
  bar.hidden = false;
  openStream();
  await show({ focus });
}

document.querySelector("#log-out").addEventListener("click", async () => {
  try {
    await call("DELETE", "/ops/session");
  } catch (error) {
    return showTrouble(`You are still logged in. ${explain(error)}`);
  }
  history.replaceState(null, "", location.pathname);
  logIn("You are logged out.");
});

watchSkipLink(main);
addEventListener("session-ended", () => logIn("Your session has ended."));
// A view has changed what it shows.
addEventListener("show-again", async ({ detail }) => {
  if (inside) await show();
  announce(detail);
});
addEventListener("hashchange", () => inside && show());
setInterval(keepCurrent, 20_000);

get("/platform/inference").then(
  () => enter({ focus: false }),
  (error) => (error.status === 401 ? logIn() : enter({ focus: false })),
);
