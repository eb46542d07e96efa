// The switch of inference and the approval of processing.

import { call } from "/dashboard/api.js";
import { confirmed } from "./confirm.js";
import { open } from "./live.js";
import { explained } from "./words.js";

const CLOSING = "Every app gets 503 from now on. Running streams continue to their end.";
const APPROVING = "While the switch is on, the prompts of all apps are sent to the provider from now on.";

// Each closing and the approval need a confirmation; the approval, in either direction, by typing the service's name.
const GATES = {
  switch: { field: "enabled", close: ["Turn inference off?", CLOSING, "Turn off"] },
  approval: {
    field: "approved",
    close: ["Withdraw the approval?", CLOSING, "Withdraw", location.host],
    open: ["Approve processing?", APPROVING, "Approve", location.host],
  },
};

export function attach(view) {
  for (const [id, gate] of Object.entries(GATES)) {
    view.querySelector(`#${id}`).addEventListener("click", ({ currentTarget }) => turn(currentTarget, gate));
  }
}

async function turn(button, { field, close, open: reopen }) {
  const refusal = document.querySelector("#switch-refusal");
  const opening = button.dataset.open !== "true";
  const question = opening ? reopen : close;
  if (question && !(await confirmed(...question))) return;
  button.disabled = true;
  refusal.textContent = "";
  try {
    await call("PUT", "/platform/inference", { body: { [field]: opening } });
    open(); // the next snapshot is two seconds away
  } catch (error) {
    if (error.status === 401) return dispatchEvent(new Event("session-ended"));
    refusal.textContent = explained(error);
  } finally {
    button.disabled = false;
    button.focus();
  }
}
