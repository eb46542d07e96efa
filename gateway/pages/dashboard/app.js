// Shows one app: its environment variables, and the output of its start command.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call, get, getText } from "./api.js";
import { showSettings } from "./app-settings.js";
import {
  action,
  announce,
  card,
  confirmed,
  empty,
  extend,
  field,
  follow,
  form,
  heading,
  redraw,
  refusal,
  table,
} from "./parts.js";

export const title = "App";

export async function draw(signal, name) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  const list = h("div");
  const show = (variables) => redraw(list, variables, (rows) => listed(rows, at, show));
  show(await get(`${at}/env`, signal));
  const output = await outputCard(at, signal);
  const settings = h("div", { class: "view" });
  await showSettings(settings, name, signal);
  return [
    heading(name, "Changes of the environment apply from the next deploy on."),
    card("Environment", setting(at, show), list),
    output,
    settings,
  ];
}

function setting(at, show) {
  const name = h("input", { id: "variable", required: true, autocomplete: "off", placeholder: "e.g. DATABASE_URL" });
  const value = h("input", { id: "value", type: "password", autocomplete: "new-password" });
  const set = async () => {
    const after = await call("PUT", `${at}/env`, { body: { [name.value]: value.value } });
    announce(`${name.value} is set.`);
    name.value = value.value = "";
    show(after);
  };
  const button = h("button", { class: "main" }, "Set");
  return form("with-button two", [field("Name", name), field("Value", value)], button, set);
}

function listed(variables, at, show) {
  if (!variables.length) return empty("No variables yet", "Builds and the start command see those that you set.");
  const line = refusal();
  const remove = ({ name }) => {
    const named = { class: "plain danger", "data-focus": name, "aria-label": `Remove ${name}` };
    return action("Remove", named, line, async (button) => {
      const loss = "Its value cannot be shown again.";
      if (!(await confirmed(`Remove ${name}?`, loss, "Remove"))) return button.focus();
      show(await call("PUT", `${at}/env`, { body: { [name]: null } }));
    });
  };
  const columns = {
    Name: ({ name }) => h("code", {}, name),
    Set: ({ updatedAt }) => moment(updatedAt),
    "": remove,
  };
  return [table("Environment variables", columns, variables), line];
}

// Nothing for an app without a start command.
async function outputCard(at, signal) {
  const log = h("pre", { class: "log", role: "log", tabindex: "0", "aria-label": "Output" });
  const refresh = async () => extend(log, (await getText(`${at}/logs`, signal)) || "There is no output yet.");
  try {
    await refresh();
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
  follow(2000, signal, refresh);
  return card("Output of the start command", log);
}
