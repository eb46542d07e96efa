// Creates an app: the view, and the form that the checklist shows too.

import { h } from "/pages/dom.js";
import { call } from "./api.js";
import { announce, card, empty, field, form, heading } from "./parts.js";
import { may } from "./session.js";

export const title = "New app";

export function draw() {
  if (!may("create_app")) return empty("Not permitted", "This session may not create apps. Ask an owner or a developer.");
  const created = (app) => `#/apps/${app.name}`;
  return [
    heading(title, "The name becomes the first part of the app’s address. You cannot change it here later."),
    card(null, appForm(created)),
  ];
}

// Calls `created` with the app as the list shows it. It can return the address of a view to open.
export function appForm(created) {
  const name = h("input", {
    id: "app-name",
    required: true,
    autocomplete: "off",
    autocapitalize: "none",
    spellcheck: "false",
    placeholder: "e.g. notes",
    "aria-describedby": "app-name-rule",
  });
  const create = async () => {
    const app = await call("POST", "/account/apps", { body: { name: name.value.trim() } });
    announce(`Created the app ${app.name}.`);
    return created(app);
  };
  const offer = h("button", { type: "button", class: "plain", hidden: true });
  offer.addEventListener("click", () => {
    name.value = offer.dataset.name;
    offer.hidden = true;
    name.focus();
  });
  name.addEventListener("input", () => {
    const fit = toAppName(name.value);
    offer.hidden = !fit || fit === name.value.replace(/-$/, "");
    offer.dataset.name = fit;
    offer.textContent = `Use ${fit}`;
  });
  const button = h("button", { class: "main" }, "Create app");
  const rule = h("p", { class: "small quiet", id: "app-name-rule" }, "Use up to 63 of the letters a to z, digits, and single hyphens.");
  return [form("with-button", [field("Name", name)], button, create, offer), rule];
}

// Returns the app's name that is most like the text: "my-notes" for "My Notes!".
const toAppName = (text) =>
  text
    .normalize("NFKD")
    .replace(/\p{M}/gu, "")
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, "-")
    .slice(0, 63)
    .replace(/^-|-$/g, "");
