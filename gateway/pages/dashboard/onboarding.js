// Guides a new account: create an app, publish it, use it. Each step is checked off from the service's data.

import { h } from "/pages/dom.js";
import { getIfThere } from "./api.js";
import { appForm } from "./new-app.js";
import { announce, badge, redraw } from "./parts.js";
import { publishZone } from "./publish.js";
import { snippet } from "./snippets.js";

const DISMISSED = "capsule-steps-dismissed"; // key in the browser's storage; its value is the account's id

// Returns an element, which is empty once all steps are done, and a function that refreshes it.
// Calls `changed` after an app was created here.
export function onboarding(signal, changed) {
  const place = h("div", { class: "steps-place" });
  let before = null; // completed steps are shown only if they were incomplete on this page
  let dismissed = false;
  const dismiss = (account) => {
    dismissed = true;
    storeDismissed(account.id);
    place.replaceChildren();
    document.querySelector("main h1").focus();
  };
  const made = async () => {
    await changed();
    place.querySelector("li[aria-current] h3")?.focus();
  };
  const refresh = async (account, apps) => {
    if (dismissed || readDismissed() === account.id || before?.done === 3) return;
    const now = await read(apps, signal);
    if (dismissed || (now.done === 3 && !before)) return;
    if (before?.app && now.done > before.done) announce(`${now.done} of 3 steps are done.`);
    before = now;
    redraw(place, now, () => checklist(now, signal, made, () => dismiss(account)));
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

function checklist({ app, live, used, done }, signal, made, dismiss) {
  const steps = [
    ["Create an app", app !== null, () => createStep(made)],
    ["Publish it", live, () => publishStep(app, signal)],
    ["Call the model or receive events", used, () => useStep(app)],
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

const installLine = `curl -fsSL ${location.origin}/install.sh | sh`;

const install = () => [
  h(
    "p",
    { class: "quiet" },
    "The command-line tool needs Python 3.11 or newer. This line installs it for your user, and says what it wrote:",
  ),
  snippet("Install the command line", installLine),
];

// The lines that write an app from the template, and publish it.
const templateLines = (app) => [
  `capsule login --url ${location.origin}`,
  `capsule new ${app}`,
  `cd ${app}`,
  "capsule deploy",
];

function createStep(made) {
  return [
    h("p", { class: "quiet" }, "Each app has its own address. Your plan limits the number of apps."),
    install(),
    h(
      "p",
      { class: "quiet" },
      "These commands write an app with a sign-in and stored data, create it here, and publish it:",
    ),
    snippet("Create from the template", templateLines("notes").join("\n")),
    h("p", { class: "quiet" }, "Or choose a name now, and publish later."),
    appForm(made),
  ];
}

// Projects to begin with: the section of the documentation of frameworks, and the command that writes one.
const EXAMPLES = [
  ["Vite", "vite-astro-and-other-static-sites", "npm create vite@latest"],
  ["Astro", "vite-astro-and-other-static-sites", "npm create astro@latest"],
  ["SvelteKit", "sveltekit", "npx sv create"],
  ["Next.js", "nextjs", "npx create-next-app@latest"],
  ["Nuxt", "nuxt-react-router-and-remix", "npm create nuxt@latest"],
  ["Express", "express-and-other-nodejs-servers", "npm install express"],
  ["FastAPI", "fastapi-and-starlette", "pip install fastapi"],
  ["Django", "django", "django-admin startproject shop ."],
];

const examples = () =>
  h(
    "details",
    {},
    h("summary", { class: "small" }, "With an example or a project of yours"),
    h(
      "p",
      { class: "quiet" },
      "Run ",
      h("code", {}, "capsule deploy"),
      " in the project's folder. It recognizes the framework, and builds and publishes the project.",
    ),
    h(
      "ul",
      { class: "examples", "aria-label": "Examples" },
      EXAMPLES.map(([name, section, command]) =>
        h("li", {}, h("a", { href: `/docs/frameworks#${section}` }, name), h("code", { class: "small" }, command)),
      ),
    ),
  );

function publishStep(app, signal) {
  const upload = [
    `tar -czf - . | curl -X PUT ${location.origin}/account/apps/${app}/source \\`,
    `  -H "Authorization: Bearer $CAPSULE_API_KEY" --data-binary @-`,
  ];
  return [
    publishZone(() => app, signal),
    agentStep(),
    examples(),
    install(),
    h(
      "p",
      { class: "quiet" },
      "Or paste these commands into a terminal. They write an app with a sign-in and stored " +
        "data, and publish it. ",
      h("code", {}, "capsule login"),
      " prompts for your API key. With ",
      h("code", {}, "--template static"),
      ", the app has pages only.",
    ),
    snippet("Publish with the command line", templateLines(app).join("\n")),
    snippet("Publish a folder that you have", `capsule deploys publish ${app} DIR --follow`),
    h(
      "details",
      {},
      h("summary", { class: "small" }, "Without the command-line tool"),
      snippet("Publish with curl", upload.join("\n")),
    ),
  ];
}

// The tools of an agent, which can create and publish apps.
function agentStep() {
  const headers = { Authorization: "Bearer ${CAPSULE_API_KEY}" };
  const servers = { mcpServers: { capsule: { type: "http", url: `${location.origin}/mcp`, headers } } };
  return h(
    "details",
    {},
    h("summary", { class: "small" }, "With an agent"),
    h("p", { class: "quiet" }, "With these lines in ", h("code", {}, ".mcp.json"), ", an agent can publish the app."),
    snippet("Agent tools", JSON.stringify(servers, null, 2)),
  );
}

function useStep(app) {
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
      "Only users of your app can call the model. In an app from the template, sign in and ask. In any other app, ",
      h("a", { href: `#/apps/${app}/settings/tokens` }, "set how their tokens are verified"),
      ". Then call the model from your pages, or from a terminal with a user’s token.",
    ),
    snippet("In a page of the app", script.join("\n")),
    snippet("From a terminal", request.join("\n")),
    h(
      "p",
      { class: "quiet" },
      "Or receive an event for each deploy and crash: ",
      h("a", { href: "#/webhooks" }, "set your webhook"),
      ".",
    ),
    snippet("Set the webhook", "capsule webhooks set https://example.com/hooks"),
  ];
}

// The browser may deny access to its storage.
function readDismissed() {
  try {
    return localStorage.getItem(DISMISSED);
  } catch {
    return null;
  }
}

function storeDismissed(account) {
  try {
    localStorage.setItem(DISMISSED, account);
  } catch {
    // The steps are shown again next time.
  }
}
