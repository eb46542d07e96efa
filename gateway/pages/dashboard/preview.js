// Publishes a preview: of a folder, or of a branch of the app's repository.

import { h } from "/pages/dom.js";
import { call } from "./api.js";
import { action, field, refusal } from "./parts.js";
import { publishZone } from "./publish.js";
import { openSheet } from "./sheet.js";

const LABEL = 63; // characters of a host name's label; the service shortens longer ones
const SLUG = 19;

// Returns the address of a branch's preview; "" if its label is too long.
function addressOf({ name, url }, branch) {
  const words = branch.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const label = `${name}--p-${words.slice(0, SLUG).replace(/-$/, "") || "preview"}`;
  return label.length > LABEL ? "" : url.replace(`//${name}.`, `//${label}.`);
}

// `app` is what the account API shows of it.
export function openPreview(app, signal) {
  const branch = h("input", { id: "branch", required: true, maxlength: 250, autocomplete: "off", value: "preview" });
  const address = h("code", { class: "whole" });
  const line = refusal();
  const show = () => (address.textContent = branch.value.trim() && addressOf(app, branch.value.trim()));
  branch.addEventListener("input", show);
  show();
  const clone = action("Publish this branch of the repository", {}, line, async () => {
    const body = { kind: "preview", branch: branch.value.trim() };
    const { deployId } = await call("POST", `/account/apps/${encodeURIComponent(app.name)}/deploys`, { body });
    return `#/deploys/${deployId}`;
  });
  openSheet(
    `Publish a preview of ${app.name}`,
    h("p", { class: "quiet" }, "It gets an address of its own. The live version stays as it is."),
    h("div", { class: "fields" }, field("Branch", branch)),
    h("p", { class: "small quiet" }, "Address: ", address),
    app.repository && h("div", { class: "row" }, clone),
    line,
    publishZone(() => app.name, signal, () => branch.value.trim()),
  );
}
