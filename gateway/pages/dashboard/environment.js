// The card with an app's environment variables.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { redeployAction } from "./deploy.js";
import { action, announce, card, confirmAction, empty, field, form, redraw, refusal, table } from "./parts.js";
import { may } from "./session.js";

export async function environmentCard(at, signal) {
  const variables = h("div", { class: "stack" });
  const show = (rows) => redraw(variables, rows, (list) => variableList(list, at, show));
  const [rows, app] = await Promise.all([get(`${at}/env`, signal), get(at, signal)]);
  show(rows);
  return card(
    "Environment",
    h("p", { class: "quiet" }, "Changes apply from the next deploy, to the live release and to previews."),
    may("change_variables") && [variableForm(at, show), fileForm(at, show)],
    app.liveDeploy && may("redeploy") && redeployment(app),
    variables,
  );
}

function redeployment({ name, liveDeploy }) {
  const line = refusal();
  return [h("div", { class: "row" }, redeployAction({ id: liveDeploy, app: name }, "Redeploy now", "", line)), line];
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

// Takes the lines of a file, such as .env.
function fileForm(at, show) {
  const text = h("textarea", { id: "variables", rows: "6", required: true, spellcheck: "false", autocomplete: "off", placeholder: "DATABASE_URL=postgres://…", "data-secret": true });
  const saved = h("p", { class: "small quiet" });
  const set = async () => {
    saved.textContent = "";
    show(await call("PUT", `${at}/env`, { body: new Blob([text.value], { type: "text/plain" }) }));
    saved.textContent = "Set all of them.";
    announce(saved.textContent);
    text.value = "";
  };
  const fields = form("", field("Lines of the file", text), h("button", {}, "Set all"), set);
  return h("details", {}, h("summary", { class: "small" }, "Paste a .env file"), h("div", { class: "stack below" }, fields, saved));
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
