// Manages deploy hooks: secret URLs that rebuild an app.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { searchable } from "./app_search.js";
import { follow } from "./follow.js";
import {
  action,
  announce,
  card,
  choice,
  confirmAction,
  empty,
  facts,
  field,
  form,
  heading,
  showOnce,
  redraw,
  refusal,
  table,
} from "./parts.js";
import { may } from "./session.js";

export const title = "Deploy hooks";

const LEAD = "A POST to a hook’s URL rebuilds its app, up to six times per minute. The URL has no other effect.";

export const draw = async (signal) => [heading(title, LEAD), await hookCards(signal)];

// The cards with the hooks of all apps, or of one.
export async function hookCards(signal, app = "") {
  const list = h("div");
  const refresh = async () => {
    const hooks = await get("/account/hooks", signal);
    redraw(list, app ? hooks.filter((hook) => hook.app === app) : hooks, (rows) => hookTable(rows, refresh));
  };
  const following = follow(["apps", "hooks"], signal, refresh);
  const [apps] = await Promise.all([app ? [{ name: app }] : get("/account/apps", signal), following]);
  const created = h("div", { class: "view" });
  const none = empty("No apps yet", "A hook rebuilds an app. Create an app first.");
  return [
    may("create_hook") && card("New hook", app && h("p", { class: "quiet" }, LEAD), apps.length ? hookForm(apps, created, refresh) : none),
    created,
    may("create_hook") && codeHosts(),
    card("Hooks", list),
  ];
}

// Which events of a code host to choose, because each one builds.
const codeHosts = () =>
  card(
    "From GitHub, GitLab or Gitea",
    h(
      "p",
      { class: "quiet" },
      "Each call builds the app, whatever event it reports, and uses up one of your plan’s deploys of the day. Choose " +
        "only pushes to the branch that the app follows.",
    ),
    facts(
      {
        GitHub:
          "In a workflow for pushes to the branch, call the URL with curl. A webhook there reports every branch and " +
          "tag, and itself when you add it.",
        GitLab: "Push events, with the branch as wildcard pattern, and no other trigger. Its test builds too.",
        "Gitea, Forgejo": "Push events, with the branch as branch filter, and no other event. Its test builds too.",
      },
      "texts",
    ),
  );

function hookForm(apps, created, refresh) {
  const names = apps.map(({ name }) => name);
  const app = searchable(choice("app", names, "Choose an app"));
  const name = h("input", {
    id: "name",
    required: true,
    maxlength: "100",
    autocomplete: "off",
    placeholder: "e.g. content system",
  });
  const create = async () => {
    const body = { name: name.value };
    const hook = await call("POST", `/account/apps/${encodeURIComponent(app.value)}/hooks`, { body });
    name.value = "";
    created.prepend(urlPanel(hook));
    announce("Created the hook.");
    await refresh();
  };
  const button = h("button", { class: "main" }, "Create");
  return form("with-button two", [field("App", app), field("Name", name)], button, create);
}

const urlPanel = ({ app, name, url }) =>
  showOnce(
    `“${name}” rebuilds ${app}`,
    "This URL is shown only once. Anyone who has it can trigger builds. If it leaks, revoke the hook.",
    url,
    h("p", { class: "small quiet" }, "To try it, run ", h("code", {}, "curl -X POST"), " with the URL."),
  );

function hookTable(hooks, refresh) {
  if (!hooks.length) return empty("No hooks yet", "Hooks that you create appear here, with the time of their last use.");
  const line = refusal();
  const revoke = ({ id, name, app }) => {
    const named = { class: "plain danger", "data-focus": id, "aria-label": `Revoke ${name}` };
    return action("Revoke", named, line, async (button) => {
      const loss = `Its URL stops working immediately and no longer rebuilds ${app}. This cannot be undone.`;
      if (!(await confirmAction(`Revoke “${name}”?`, loss, "Revoke"))) return button.focus();
      await call("DELETE", `/account/hooks/${encodeURIComponent(id)}`);
      await refresh();
      document.querySelector("main h1").focus();
      announce(`Revoked the hook ${name}.`);
    });
  };
  const columns = {
    Name: ({ name }) => name,
    Id: ({ id }) => h("code", {}, id),
    App: ({ app }) => app,
    Created: ({ createdAt }) => moment(createdAt),
    "Last used": ({ lastUsedAt }) => (lastUsedAt ? moment(lastUsedAt) : h("span", { class: "quiet" }, "Never")),
    ...(may("revoke_hook") && { "": revoke }),
  };
  return [table("Deploy hooks", columns, hooks), line];
}
