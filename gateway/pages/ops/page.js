// The operators' page: who is logged in, the live figures, and the switch.

import { plural } from "/pages/format.js";
import { call, get } from "/dashboard/api.js";
import { draw } from "./figures.js";

const SILENCE = 7000; // ms without a snapshot, of which there is one every two seconds
const AGAIN = 3000; // ms

const main = document.querySelector("main");
const bar = document.querySelector(".top");
const live = document.querySelector("#live");
let source, heard, watching;

// -- logging in --------------------------------------------------------------------------------------------------

function logIn(why = "With the service’s operator token.") {
  stop();
  bar.hidden = true;
  document.title = "Log in · Capsule operations";
  main.replaceChildren(document.querySelector("#log-in").content.cloneNode(true));
  const form = main.querySelector("form");
  const [token, button, refusal] = ["#token", "button", "#refusal"].map((name) => form.querySelector(name));
  form.querySelector("#why").textContent = why;
  const refuse = (text) => {
    refusal.textContent = text;
    token.setAttribute("aria-invalid", "true");
    token.focus();
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    if (!token.value.trim()) return refuse("Paste the operator token.");
    button.disabled = true;
    refusal.textContent = "";
    token.removeAttribute("aria-invalid");
    try {
      await call("POST", "/ops/session", { body: { token: token.value.trim() } });
    } catch (error) {
      button.disabled = false;
      return refuse(explained(error));
    }
    enter();
  });
  token.focus();
}

function explained(error) {
  if (error.status === 0) return "The service cannot be reached. Check your connection and try again.";
  if (error.status === 401) return "This is not the operator token. Check that all of it was copied.";
  if (error.code === "LOGINS_LIMITED") {
    return `Too many log-ins failed from your address. Try again in ${plural(error.retryAfter ?? 60, "second")}.`;
  }
  return error.message || "The service could not answer. Try again.";
}

document.querySelector("#log-out").addEventListener("click", async () => {
  try {
    await call("DELETE", "/ops/session");
  } catch (error) {
    return trouble(`You are still logged in. ${explained(error)}`);
  }
  logIn("You are logged out.");
});

// -- figures -----------------------------------------------------------------------------------------------------

async function enter() {
  document.title = "Operations · Capsule";
  main.replaceChildren(document.querySelector("#figures").content.cloneNode(true));
  main.classList.add("waiting");
  bar.hidden = false;
  for (const [id, gate] of Object.entries(GATES)) {
    document.getElementById(id).addEventListener("click", () => turn(id, gate));
  }
  open();
}

function open() {
  stop();
  heard = Date.now();
  source = new EventSource("/ops/events");
  source.addEventListener("message", ({ data }) => {
    heard = Date.now();
    tell("Live", "good");
    trouble("");
    draw(JSON.parse(data));
    main.classList.remove("waiting");
  });
  source.addEventListener("away", () => {
    heard = Date.now();
    tell("No figures", "bad");
    trouble("Redis does not answer: new requests are refused, and running streams go on. The figures below are the last ones.");
  });
  // The browser tries again by itself, unless the answer was no stream.
  source.addEventListener("error", () => source.readyState === EventSource.CLOSED && askWhy());
  watching = setInterval(() => {
    if (Date.now() - heard < SILENCE) return;
    tell("No figures", "warn");
    trouble("Nothing was heard of the gateway for some seconds. The figures below are the last ones.");
  }, 1000);
}

function stop() {
  source?.close();
  clearInterval(watching);
}

// An EventSource does not tell what it was answered.
async function askWhy() {
  const asking = new AbortController();
  const response = await fetch("/ops/events", { signal: asking.signal }).catch(() => null);
  const told = response?.ok === false ? await response.json().catch(() => null) : null;
  asking.abort();
  if (response?.status === 401) return logIn("Your session has ended.");
  tell("No figures", "warn");
  trouble(explained({ status: response?.status ?? 0, ...told?.error }));
  setTimeout(() => bar.hidden || document.hidden || open(), AGAIN);
}

function tell(text, tone) {
  live.textContent = text;
  live.className = `badge small ${tone}`;
}

function trouble(text) {
  const shown = document.querySelector("#trouble");
  if (!shown || shown.textContent === text) return;
  shown.textContent = text;
  shown.hidden = !text;
}

// Nobody looks: no figures are taken for this page.
document.addEventListener("visibilitychange", () => {
  if (bar.hidden) return;
  document.hidden ? stop() : open();
});

// -- the switch --------------------------------------------------------------------------------------------------

const GATES = {
  switch: {
    field: "enabled",
    sure: ["Turn inference off?", "Every app gets 503 from now on. Streams that run go on to their end.", "Turn off"],
  },
  approval: {
    field: "approved",
    sure: ["Withdraw the approval?", "Every app gets 503 from now on. Streams that run go on to their end.", "Withdraw"],
  },
};

async function turn(id, { field, sure }) {
  const button = document.getElementById(id);
  const refusal = document.querySelector("#switch-refusal");
  const opening = button.dataset.open !== "true";
  if (!opening && !(await confirmed(...sure))) return;
  button.disabled = true;
  refusal.textContent = "";
  try {
    await call("PUT", "/platform/inference", { body: { [field]: opening } });
    open(); // the next snapshot is two seconds away
  } catch (error) {
    error.status === 401 ? logIn("Your session has ended.") : (refusal.textContent = explained(error));
  } finally {
    button.disabled = false;
    button.focus();
  }
}

function confirmed(title, text, yes) {
  const dialog = document.querySelector("#sure");
  dialog.querySelector("#sure-title").textContent = title;
  dialog.querySelector("#sure-text").textContent = text;
  dialog.querySelector("#sure-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

get("/platform/inference").then(enter, (error) => (error.status === 401 ? logIn() : enter()));
