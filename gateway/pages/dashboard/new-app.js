// Creates an app: a view of its own, and the form that the checklist shows too.

import { h } from "/pages/dom.js";
import { call } from "./api.js";
import { announce, card, field, form, heading } from "./parts.js";

export const title = "New app";

export function draw() {
  const created = (app) => (location.hash = `#/apps/${app.name}`);
  return [
    heading(title, "Its name becomes the first part of its address and cannot be changed here later."),
    card(null, creation(created)),
  ];
}

// `created` gets the app as the list shows it.
export function creation(created) {
  const name = h("input", {
    id: "app-name",
    required: true,
    maxlength: "63",
    autocomplete: "off",
    autocapitalize: "none",
    spellcheck: "false",
    placeholder: "e.g. notes",
    "aria-describedby": "app-name-rule",
  });
  const create = async () => {
    const app = await call("POST", "/account/apps", { body: { name: name.value.trim() } });
    announce(`The app ${app.name} is created.`);
    await created(app);
  };
  const button = h("button", { class: "main" }, "Create app");
  const rule = h("p", { class: "small quiet", id: "app-name-rule" }, "Letters a to z, digits, and single hyphens.");
  return [form("with-button", [field("Name", name)], button, create), rule];
}
