// Draws the switch between apps, and the tabs of the account or of the app that it shows.

import { h } from "/pages/dom.js";
import { get } from "./api.js";

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

const list = document.querySelector("#switch");

list.addEventListener("change", () => (location.hash = list.value ? `#/apps/${list.value}` : "#/"));

export async function showNavigation(bar, path, signal) {
  const app = path.match(/^\/apps\/([\w-]+)/)?.[1] ?? "";
  const tabs = app ? Object.entries(APP).map(([name, end]) => [name, `/apps/${app}${end}`]) : Object.entries(ACCOUNT);
  const leads = (target) => path === target || path.startsWith(`${target}/`);
  const current = tabs.map(([, target]) => target).filter(leads).at(-1) ?? "/"; // the longest is the last
  const nav = bar.querySelector("nav");
  const tab = ([name, target]) =>
    h("a", { href: `#${target}`, "aria-current": target === current ? "page" : null }, name);
  const focus = nav.contains(document.activeElement) && document.activeElement.textContent;
  nav.replaceChildren(...tabs.map(tab));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  if (focus) [...nav.children].find(({ textContent }) => textContent === focus)?.focus();
  offer(app ? [app] : [], app);
  // The view reports a failure.
  const apps = await get("/account/apps", signal).catch(() => null);
  if (apps && !signal.aborted) offer(apps.map(({ name }) => name), app);
}

function offer(names, app) {
  const option = (name) => h("option", { value: name }, name);
  list.replaceChildren(h("option", { value: "" }, "All apps"), ...names.map(option));
  list.value = app;
}
