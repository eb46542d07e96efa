// Guides a new account: make an app, publish it, use it. Each step is ticked off by what the service knows.

import { h } from "/pages/dom.js";
import { getIfThere } from "./api.js";
import { creation } from "./new-app.js";
import { announce, badge, redraw } from "./parts.js";
import { snippet } from "./snippets.js";

const DISMISSED = "capsule-steps-dismissed"; // in the browser's storage: the id of the account

// Returns an element, which stays empty when there is nothing to guide, and what brings it up to date.
// `changed` runs after an app was made here.
export function onboarding(signal, changed) {
  const place = h("div", { class: "steps-place" });
  let before = null; // finished steps are shown only to those who saw them unfinished
  let dismissed = false;
  const dismiss = (account) => {
    dismissed = true;
    remember(account.id);
    place.replaceChildren();
    document.querySelector("main h1").focus();
  };
  const made = async () => {
    await changed();
    place.querySelector("li[aria-current] h3")?.focus();
  };
  const refresh = async (account, apps) => {
    if (dismissed || recalled() === account.id || before?.done === 3) return;
    const now = await read(apps, signal);
    if (dismissed || (now.done === 3 && !before)) return;
    if (before?.app && now.done > before.done) announce(`${now.done} of 3 steps are done.`);
    before = now;
    redraw(place, now, () => checklist(now, made, () => dismiss(account)));
  };
  return [place, refresh];
}

async function read(apps, signal) {
  const live = apps.find((app) => app.status === "live");
  const [usage, webhook] = await Promise.all([
    getIfThere("/account/usage", signal),
    getIfThere("/account/webhook", signal),
  ]);
  const used = webhook !== null || (usage ?? []).some((hour) => hour.requests > 0);
  const app = (live ?? apps[0])?.name ?? null;
  return { app, live: Boolean(live), used, done: [app, live, used].filter(Boolean).length };
}

function checklist({ app, live, used, done }, made, dismiss) {
  const steps = [
    ["Make an app", app !== null, () => making(made)],
    ["Publish it", live, () => publishing(app)],
    ["Ask the model, or receive events", used, () => using(app)],
  ];
  const current = steps.findIndex(([, done]) => !done);
  return h(
    "section",
    { class: "card steps", "aria-labelledby": "steps" },
    h(
      "div",
      { class: "row apart" },
      h("h2", { id: "steps" }, done === 3 ? "You are all set" : "Get started"),
      h("span", { class: "small quiet" }, `${done} of 3 done`),
      h("button", { type: "button", class: "plain", onclick: dismiss }, "Dismiss"),
    ),
    h(
      "ol",
      {},
      steps.map(([name, done, show], n) => step(name, done, n === current && show())),
    ),
  );
}

const step = (name, done, content) =>
  h(
    "li",
    { "aria-current": content ? "step" : null },
    h("div", { class: "row apart" }, h("h3", { tabindex: "-1" }, name), done ? badge("Done", "good") : badge("To do")),
    content && h("div", { class: "stack" }, content),
  );

function making(made) {
  return [
    h("p", { class: "quiet" }, "An app has an address of its own. Your plan says how many you can have."),
    creation(made),
  ];
}

function publishing(app) {
  const page = `<!doctype html><title>${app}</title><h1>It works</h1>`;
  const commands = [
    `mkdir ${app} && cd ${app}`,
    `echo '${page}' > index.html`,
    `capsule login --url ${location.origin}`,
    `capsule deploys publish ${app} . --follow`,
  ];
  const upload = [
    `tar -czf - . | curl -X PUT ${location.origin}/account/apps/${app}/source \\`,
    `  -H "Authorization: Bearer $CAPSULE_API_KEY" --data-binary @-`,
  ];
  return [
    h(
      "p",
      { class: "quiet" },
      "Paste these commands. They publish a page of one line; for an app that you have, leave out the first two. ",
      h("code", {}, "capsule login"),
      " asks for your API key.",
    ),
    snippet("Publish with the command line", commands.join("\n")),
    h(
      "details",
      {},
      h("summary", { class: "small" }, "Without the tool"),
      snippet("Publish with curl", upload.join("\n")),
    ),
    h("p", { class: "small quiet" }, "Or ", h("a", { href: "#/deploys" }, "upload a tar.gz"), " here."),
  ];
}

function using(app) {
  const script = [
    `import { streamComplete } from "./lib/ai.js";`,
    "",
    `await streamComplete("What is a capsule?", (token) => document.body.append(token));`,
  ];
  const request = [
    `curl -N ${location.origin}/capsule/${app}/ai -H "Authorization: Bearer $USER_TOKEN" \\`,
    `  -H 'Content-Type: application/json' -d '{"prompt": "What is a capsule?", "stream": true}'`,
  ];
  return [
    h(
      "p",
      { class: "quiet" },
      "Only users of your app can ask: ",
      h("a", { href: `#/apps/${app}` }, "say how their tokens are verified"),
      ". Then call the model from your pages, or from a terminal with the token of a user.",
    ),
    snippet("In a page of the app", script.join("\n")),
    snippet("From a terminal", request.join("\n")),
    h(
      "p",
      { class: "quiet" },
      "Or receive an event of each deploy and crash: ",
      h("a", { href: "#/notifications" }, "set your receiver"),
      ".",
    ),
    snippet("Set the receiver", "capsule webhook set https://example.com/hooks"),
  ];
}

// The browser may refuse its storage.
function recalled() {
  try {
    return localStorage.getItem(DISMISSED);
  } catch {
    return null;
  }
}

function remember(account) {
  try {
    localStorage.setItem(DISMISSED, account);
  } catch {
    // The steps are shown again next time.
  }
}
