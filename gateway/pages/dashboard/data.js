// Shows the data of an app's start command: how full, and snapshots.

import { h } from "/pages/dom.js";
import { capital, moment, size } from "/pages/format.js";
import { call, get } from "./api.js";
import { follow } from "./follow.js";
import { action, announce, badge, confirmAction, empty, heading, redraw, refusal, table } from "./parts.js";
import { may } from "./session.js";

export const title = "Data";

const PATIENCE = 600_000; // ms for the app's host, which copies all data
const STATES = {
  running: ["In use", "good"],
  asleep: ["The app sleeps", ""],
  suspended: ["The app is suspended", "bad"],
  restoring: ["Being replaced", "warn"],
  full: ["Full", "bad"],
};

export async function draw(signal, { app: name }) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  const body = h("section", { class: "card" });
  const line = refusal();

  const refresh = async () => {
    const data = await get(`${at}/data`, signal);
    const known = data.state !== "none" || data.snapshots.length > 0;
    redraw(body, data, () => (known ? shown(data) : none()));
  };

  const make = action("Make a snapshot", { class: "main", "data-focus": "make" }, line, async () => {
    const made = await call("POST", `${at}/data/snapshots`, { deadline: PATIENCE });
    announce(`Made a snapshot of ${size(made.bytes)}.`);
    await refresh();
  });
  const clear = action("Clear", { class: "danger", "data-focus": "clear" }, line, async (button) => {
    const loss = "The app starts again with an empty folder. Its present data are kept as a snapshot first.";
    if (!(await confirmAction("Clear all data?", loss, "Clear"))) return button.focus();
    await call("DELETE", `${at}/data`, { deadline: PATIENCE });
    announce("Cleared the data.");
    await refresh();
    button.focus();
  });
  const download = ({ id }) =>
    h("a", { href: `${at}/data/snapshots/${id}`, download: true, "aria-label": `Download ${id}` }, "Download");
  const restore = ({ id, at: made }) => {
    const label = { "aria-label": `Restore ${id}`, "data-focus": `restore-${id}` };
    return may("restore_data") && action("Restore", label, line, async (button) => {
      const loss = `The app gets the data of ${new Date(made).toLocaleString()}. Its present data are kept as a snapshot first.`;
      const sure = await confirmAction("Restore this snapshot?", loss, "Restore", { keep: "Cancel", tone: "main" });
      if (!sure) return button.focus();
      const { deployId } = await call("POST", `${at}/data/restore`, { body: { snapshotId: id } });
      announce("Queued a deploy on the restored data.");
      return `#/deploys/${deployId}`;
    });
  };

  const shown = ({ usedBytes, limitBytes, state, problem, snapshots }) => [
    h(
      "p",
      { class: "row" },
      h("meter", { min: 0, max: limitBytes, high: limitBytes * 0.8, value: usedBytes, "aria-label": "Data" }),
      `${size(usedBytes)} of ${size(limitBytes)}`,
      STATES[state] && badge(...STATES[state]),
    ),
    problem && h("p", { class: "refusal" }, problem),
    line,
    h("div", { class: "row" }, may("make_snapshot") && make, may("clear_data") && clear),
    snapshots.length ? table("Snapshots", columns(), snapshots) : h("p", { class: "quiet" }, "No snapshots yet."),
  ];

  const columns = () => ({
    Snapshot: ({ at: made }) => moment(made),
    Reason: ({ reason, deployId }) =>
      deployId ? h("a", { href: `#/deploys/${deployId}` }, `Before a ${reason}`) : capital(reason),
    Size: ({ bytes }) => size(bytes),
    "": (snapshot) => h("div", { class: "row" }, download(snapshot), restore(snapshot)),
  });

  await follow(["data"], signal, refresh);
  return [heading(title, `The files that ${name} keeps, and their snapshots.`), body];
}

const none = () => empty("No data yet", "The files that the start command writes to DATA_DIR outlive its deploys.");
