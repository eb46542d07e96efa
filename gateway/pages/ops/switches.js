// The switch of inference, the approval of processing, and the switches of the providers.

import { call } from "/dashboard/api.js";
import { confirmAction } from "./confirm.js";
import { openStream } from "./live.js";
import { explain } from "./words.js";

const CLOSING = "All apps’ requests will get 503. Running streams continue until they end.";
const OPENING = "All apps’ requests will be sent to the provider, if processing is approved.";
const APPROVING = "While the switch is on, the prompts of all apps will be sent to the provider.";

// Each change needs a confirmation, and closing a reason. Changing the approval needs the service's name to be typed.
const GATES = {
  switch: {
    field: "enabled",
    close: ["Turn inference off?", CLOSING, "Turn off", { required: true }],
    open: ["Turn inference on?", OPENING, "Turn on"],
  },
  approval: {
    field: "approved",
    close: ["Withdraw the approval?", CLOSING, "Withdraw", { type: location.host, required: true }],
    open: ["Approve processing?", APPROVING, "Approve", { type: location.host }],
  },
};

export function attach(view) {
  for (const [id, gate] of Object.entries(GATES)) {
    view.querySelector(`#${id}`).addEventListener("click", ({ currentTarget }) => flip(currentTarget, gate));
  }
  view.querySelector("#providers").addEventListener("click", ({ target }) => {
    const { provider } = target.dataset;
    if (provider) flip(target, switchOf(provider));
  });
}

const switchOf = (provider) => ({
  field: "enabled",
  path: `/platform/providers/${encodeURIComponent(provider)}`,
  close: [`Disable ${provider}?`, `New requests go to the other providers. Running streams continue.`, "Disable", { required: true }],
  open: [`Enable ${provider}?`, `Requests may go to ${provider} again.`, "Enable"],
});

async function flip(button, { field, path = "/platform/inference", close, open: reopen }) {
  const refusal = document.querySelector("#switch-refusal");
  const opening = button.dataset.open !== "true";
  const reason = await confirmAction(...(opening ? reopen : close));
  if (reason === null) return;
  button.disabled = true;
  refusal.textContent = "";
  try {
    await call("PUT", path, { body: { [field]: opening }, reason });
    openStream(); // the next snapshot is two seconds away
  } catch (error) {
    if (error.status === 401) return dispatchEvent(new Event("session-ended"));
    refusal.textContent = explain(error);
  } finally {
    button.disabled = false;
    button.focus();
  }
}
