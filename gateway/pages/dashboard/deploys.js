// Lists the account's deploys, and starts new ones.

import { h } from "/pages/dom.js";
import { capital, duration, moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { badge, card, choice, empty, field, follow, form, heading, redraw, table } from "./parts.js";

export const title = "Deploys";

const TONES = { live: "good", failed: "bad", canceled: "", building: "busy", checking: "busy", canary: "busy" };

export const stateOf = ({ state }) => badge(capital(state), TONES[state]);

export async function draw(signal) {
  const list = h("div");
  const only = h("select", { "aria-label": "Show" }, h("option", { value: "" }, "All apps"));
  const refresh = async () => {
    const app = only.value;
    const rows = await get(`/account/deploys?limit=50${app && `&app=${encodeURIComponent(app)}`}`, signal);
    if (app === only.value) redraw(list, rows, listed);
  };
  const [apps] = await Promise.all([get("/account/apps", signal), refresh()]);
  only.append(...apps.map(({ name }) => h("option", {}, name)));
  // The next refresh, seconds away, reports a failure.
  only.addEventListener("change", () => refresh().catch(() => {}));
  follow(3000, signal, refresh);
  const title = h("div", { class: "row apart" }, h("h2", {}, "History"), apps.length > 1 && h("div", {}, only));
  return [
    heading("Deploys", "Every build of your apps, newest first, for 90 days."),
    apps.length > 0 && card("Publish", publishing(apps)),
    card(title, list),
  ];
}

function listed(deploys) {
  if (!deploys.length) return empty("No deploys yet", "Publish an app, or trigger one of its hooks.");
  const named = ({ id, app }) => ({ href: `#/deploys/${id}`, "data-focus": id, "aria-label": `${app}, deploy ${id}` });
  const columns = {
    App: (deploy) => h("a", named(deploy), deploy.app),
    State: stateOf,
    Kind: ({ kind }) => capital(kind),
    Trigger: ({ trigger }) => capital(trigger),
    Queued: ({ createdAt }) => moment(createdAt),
    Took: ({ durationMs }) => duration(durationMs),
  };
  return table("Deploys", columns, deploys);
}

function publishing(apps) {
  const names = apps.map(({ name }) => name);
  const app = choice("app", names);
  const source = h("input", { id: "source", type: "file", accept: ".tgz,.gz,application/gzip", required: true });
  const publish = async () => {
    const body = source.files[0];
    const { deployId } = await call("PUT", `/account/apps/${encodeURIComponent(app.value)}/source`, { body });
    location.hash = `#/deploys/${deployId}`;
  };
  const button = h("button", { class: "main" }, "Publish");
  return form("with-button two", [field("App", app), field("Source, as a tar.gz", source)], button, publish);
}
