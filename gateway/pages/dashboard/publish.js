// Publishes an app without a terminal: from a dropped or chosen folder, archive or page.

import { h } from "/pages/dom.js";
import { plural } from "/pages/format.js";
import { upload } from "./api.js";
import { pack, readChosen, readDrop } from "./packing.js";
import { announce, field, refusal, run } from "./parts.js";

const ACCEPTED = ".html,.htm,.zip,.tgz,.gz";

// `nameApp` returns the name of the app, or "" if none is chosen yet. `nameBranch` returns the branch of a preview.
export function publishZone(nameApp, signal, nameBranch) {
  const message = h("input", { id: nameBranch ? "preview-message" : "message", maxlength: 200, autocomplete: "off" });
  const line = refusal();
  const bar = h("progress", { max: "1", value: "0", "aria-label": "Upload", hidden: true });
  const state = h("p", { class: "small quiet" });
  let busy = false;

  const publish = async (reading) => {
    if (busy) return;
    busy = true;
    await run(line, () => send(reading));
    busy = false;
    bar.hidden = true;
    state.textContent = "";
  };
  const send = async (reading) => {
    const app = nameApp();
    if (!app) throw { status: 400, message: "Choose an app first." };
    if (nameBranch && !nameBranch()) throw { status: 400, message: "Name the branch first." };
    say("Packing …");
    const { files, omitted } = await reading;
    const { body, type, count } = await pack(files);
    const omission = omitted ? ` ${plural(omitted, "file")} left out.` : "";
    bar.hidden = false;
    say(`Uploading ${plural(count, "file")} …${omission}`);
    const described = Object.entries({ preview: nameBranch?.(), message: message.value.trim() });
    const query = new URLSearchParams(described.filter(([, value]) => value));
    const path = `/account/apps/${encodeURIComponent(app)}/source?${query}`;
    const { deployId } = await upload(path, body, type, (share) => (bar.value = share), signal);
    announce(`Published ${app}.${omission}`);
    if (!signal.aborted) location.hash = `#/deploys/${deployId}`;
  };
  const say = (text) => (state.textContent = text);

  const zone = h(
    "div",
    { class: "drop stack" },
    field("What has changed (optional)", message),
    h("p", {}, "Drop a folder, an archive (.zip, .tar.gz) or a page (.html) here."),
    h(
      "div",
      { class: "row" },
      chooser("Choose a folder", { webkitdirectory: true }, publish),
      chooser("Choose a file", { accept: ACCEPTED }, publish),
    ),
    bar,
    state,
    line,
  );
  const mark = (over) => (event) => {
    event.preventDefault();
    zone.classList.toggle("over", over);
  };
  zone.addEventListener("dragover", mark(true));
  zone.addEventListener("dragleave", mark(false));
  zone.addEventListener("drop", (event) => {
    mark(false)(event);
    publish(readDrop(event.dataTransfer));
  });
  return zone;
}

function chooser(label, properties, publish) {
  const input = h("input", { type: "file", hidden: true, "aria-label": label, ...properties });
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = ""; // the same file can be chosen again
    if (files.length) publish(readChosen(files));
  });
  return [h("button", { type: "button", onclick: () => input.click() }, label), input];
}
