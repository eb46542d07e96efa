// Draws the switch between apps, and the tabs of the account or of the app that it shows.

import { h } from "/pages/dom.js";
import { get } from "./api.js";
import { openAppSearch, redrawAppSearch } from "./app_search.js";
import { follow } from "./follow.js";
import { may } from "./session.js";

const ACCOUNT = {
  Overview: "/",
  Requests: "/requests",
  Usage: "/usage",
  Deploys: "/deploys",
  "Deploy hooks": "/hooks",
  Webhooks: "/webhooks",
  Account: "/account",
};
const APP = {
  Overview: "",
  Deploys: "/deploys",
  Requests: "/requests",
  Usage: "/usage",
  Data: "/data",
  "Try it": "/try",
  Settings: "/settings",
};

const button = document.querySelector("#app-switch");
let [names, shown] = [[], ""]; // the account's apps, and the app whose tabs are shown

button.addEventListener("click", openSwitch);

// Until the signal aborts. The view reports a failure.
export function watchApps(signal) {
  const refresh = async () => {
    const apps = await get("/account/apps", signal).catch(() => null);
    if (apps) names = apps.map(({ name }) => name);
    button.hidden = !names.length && !shown;
    redrawAppSearch();
  };
  follow(["apps"], signal, refresh);
  signal.addEventListener("abort", () => (names = []), { once: true }); // logged out
}

export function showNavigation(bar, path) {
  const app = path.match(/^\/apps\/([\w-]+)/)?.[1] ?? "";
  const ofApp = Object.entries(APP).filter(([name]) => name !== "Try it" || may("create_test_token"));
  const tabs = app ? ofApp.map(([name, end]) => [name, `/apps/${app}${end}`]) : Object.entries(ACCOUNT);
  const leads = (target) => path === target || path.startsWith(`${target}/`);
  const current = tabs.map(([, target]) => target).filter(leads).at(-1) ?? "/"; // the longest is the last
  const nav = bar.querySelector("nav");
  const tab = ([name, target]) =>
    h("a", { href: `#${target}`, "aria-current": target === current ? "page" : null }, name);
  const focus = nav.contains(document.activeElement) && document.activeElement.textContent;
  nav.replaceChildren(...tabs.map(tab));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  if (focus) [...nav.children].find(({ textContent }) => textContent === focus)?.focus();
  shown = app;
  button.textContent = app || "All apps";
  button.hidden = !names.length && !shown;
}

export async function openSwitch() {
  if (button.hidden || document.querySelector("dialog[open]")) return;
  await openAppSearch("Switch app", () => ["", ...names], (name) =>
    h("a", { href: name ? `#/apps/${name}` : "#/", "aria-current": name === shown ? "true" : null }, name || "All apps"),
  );
}
