// The card with an app's environment variables.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { action, announce, card, confirmAction, empty, field, form, redraw, refusal, table } from "./parts.js";
import { may } from "./session.js";

export async function environmentCard(at, signal) {
  const variables = h("div", { class: "stack" });
  const show = (rows) => redraw(variables, rows, (list) => variableList(list, at, show));
  show(await get(`${at}/env`, signal));
  return card("Environment", h("p", { class: "quiet" }, "Changes apply from the next deploy."), may("change_variables") && variableForm(at, show), variables);
}

function variableForm(at, show) {
  const name = h("input", { id: "variable", required: true, autocomplete: "off", placeholder: "e.g. DATABASE_URL" });
  const value = h("input", { id: "value", type: "password", autocomplete: "new-password" });
  const set = async () => {
    const after = await call("PUT", `${at}/env`, { body: { [name.value]: value.value } });
    saved.textContent = `Set ${name.value}.`;
    announce(saved.textContent);
    name.value = value.value = "";
    show(after);
  };
  const saved = h("p", { class: "small quiet" });
  const button = h("button", { class: "main" }, "Set");
  return [form("with-button two", [field("Name", name), field("Value", value)], button, set), saved];
}

function variableList(variables, at, show) {
  if (!variables.length) return empty("No variables yet", "Builds and the start command can read the variables that you set.");
  const line = refusal();
  const remove = ({ name }) => {
    const named = { class: "plain danger", "data-focus": name, "aria-label": `Remove ${name}` };
    return action("Remove", named, line, async (button) => {
      const loss = "You cannot recover its value.";
      if (!(await confirmAction(`Remove ${name}?`, loss, "Remove"))) return button.focus();
      show(await call("PUT", `${at}/env`, { body: { [name]: null } }));
    });
  };
  const columns = {
    Name: ({ name }) => h("code", {}, name),
    Set: ({ updatedAt }) => moment(updatedAt),
    ...(may("change_variables") && { "": remove }),
  };
  return [table("Environment variables", columns, variables), line];
}
