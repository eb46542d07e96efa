// The cards with an app's environment variables, and with what differs in previews.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { redeployAction } from "./deploy.js";
import { action, announce, card, confirmAction, empty, field, form, redraw, refusal, table } from "./parts.js";
import { may } from "./session.js";

// `id` begins the ids of a card's controls, and `where` ends their labels. `none` stands for a preview without the variable.
const LIVE = {
  id: "",
  where: "",
  path: "env",
  list: "Environment variables",
  empty: ["No variables yet", "Builds and the start command can read the variables that you set."],
  loss: "You cannot recover its value.",
};
const PREVIEWS = {
  id: "preview-",
  where: " for previews",
  path: "env?kind=preview",
  list: "Variables that differ in previews",
  empty: ["The same values", "Previews have the variables of the live release."],
  loss: "Previews get the value of the live release again.",
  none: "Previews do not have this variable",
};

export async function environmentCards(at, signal) {
  const [live, previews, app] = await Promise.all([
    variableTable(at, LIVE, signal),
    variableTable(at, PREVIEWS, signal),
    get(at, signal),
  ]);
  return [
    card(
      "Environment",
      h("p", { class: "quiet" }, "Changes apply from the next deploy, to the live release and to previews."),
      live.forms,
      app.liveDeploy && may("redeploy") && redeployment(app),
      live.variables,
    ),
    card(
      "Previews",
      h("p", { class: "quiet" }, "Previews have the variables above, except those to which you give another value here, or none."),
      previews.forms,
      previews.variables,
    ),
  ];
}

async function variableTable(at, kind, signal) {
  const address = `${at}/${kind.path}`;
  const variables = h("div", { class: "stack" });
  const show = (rows) =>
    redraw(variables, rows.filter(({ inPreviews }) => kind === LIVE || ["other", "none"].includes(inPreviews)), (list) => variableList(list, address, show, kind));
  show(await get(address, signal));
  return { variables, forms: may("change_variables") && [variableForm(address, show, kind), fileForm(address, show, kind)] };
}

function redeployment({ name, liveDeploy }) {
  const line = refusal();
  return [h("div", { class: "row" }, redeployAction({ id: liveDeploy, app: name }, "Redeploy now", "", line)), line];
}

function variableForm(address, show, { id, where, none }) {
  const name = h("input", { id: `${id}variable`, required: true, autocomplete: "off", placeholder: "e.g. DATABASE_URL" });
  const value = h("input", { id: `${id}value`, type: "password", autocomplete: "new-password" });
  const without = h("input", { id: `${id}none`, type: "checkbox", onchange: () => (value.disabled = without.checked) });
  const set = async () => {
    const after = await call("PUT", address, { body: { [name.value]: without.checked ? false : value.value } });
    saved.textContent = without.checked ? `Kept ${name.value} out of previews.` : `Set ${name.value}${where}.`;
    announce(saved.textContent);
    name.value = value.value = "";
    without.checked = value.disabled = false;
    show(after);
  };
  const saved = h("p", { class: "small quiet" });
  const button = h("button", { class: "main" }, `Set${where}`);
  const choice = none && h("label", { class: "choice" }, without, none);
  return [form("with-button two", [field(`Name${where}`, name), field(`Value${where}`, value)], button, set), choice, saved];
}

// Takes the lines of a file, such as .env.
function fileForm(address, show, { id, where }) {
  const text = h("textarea", { id: `${id}variables`, rows: "6", required: true, spellcheck: "false", autocomplete: "off", placeholder: "DATABASE_URL=postgres://…", "data-secret": true });
  const saved = h("p", { class: "small quiet" });
  const set = async () => {
    saved.textContent = "";
    show(await call("PUT", address, { body: new Blob([text.value], { type: "text/plain" }) }));
    saved.textContent = `Set all of them${where}.`;
    announce(saved.textContent);
    text.value = "";
  };
  const fields = form("", field(`Lines of the file${where}`, text), h("button", {}, `Set all${where}`), set);
  return h("details", {}, h("summary", { class: "small" }, `Paste a .env file${where}`), h("div", { class: "stack below" }, fields, saved));
}

function variableList(variables, address, show, { list, empty: none, loss }) {
  if (!variables.length) return empty(...none);
  const line = refusal();
  const remove = ({ name }) => {
    const named = { class: "plain danger", "data-focus": name, "aria-label": `Remove ${name}` };
    return action("Remove", named, line, async (button) => {
      if (!(await confirmAction(`Remove ${name}?`, loss, "Remove"))) return button.focus();
      show(await call("PUT", address, { body: { [name]: null } }));
    });
  };
  const columns = {
    Name: ({ name }) => h("code", {}, name),
    ...(variables[0].inPreviews && { "In previews": ({ inPreviews }) => (inPreviews === "none" ? "none" : "another value") }),
    Set: ({ updatedAt }) => moment(updatedAt),
    ...(may("change_variables") && { "": remove }),
  };
  return [table(list, columns, variables), line];
}
