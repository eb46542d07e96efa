// The operators' page: logs in and out, shows live figures, and turns the inference switch.

import { plural } from "/pages/format.js";
import { call, get } from "/dashboard/api.js";
import { draw } from "./figures.js";

const SILENCE = 7000; // ms without a snapshot; the gateway sends one every two seconds
const AGAIN = 3000; // ms before another attempt

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
    setStatus("Live", "good");
    trouble("");
    draw(JSON.parse(data));
    main.classList.remove("waiting");
  });
  source.addEventListener("away", () => {
    heard = Date.now();
    setStatus("No figures", "bad");
    trouble("Redis does not answer. New requests are refused; running streams continue. The figures below are the last ones.");
  });
  // The browser reconnects by itself, unless the answer was not a stream.
  source.addEventListener("error", () => source.readyState === EventSource.CLOSED && askWhy());
  watching = setInterval(() => {
    if (Date.now() - heard < SILENCE) return;
    setStatus("No figures", "warn");
    trouble("The gateway has sent nothing for some seconds. The figures below are the last ones.");
  }, 1000);
}

function stop() {
  source?.close();
  clearInterval(watching);
}

// An EventSource hides the answer's status and body, so the request is repeated to read them.
async function askWhy() {
  const asking = new AbortController();
  const response = await fetch("/ops/events", { signal: asking.signal }).catch(() => null);
  const answer = response?.ok === false ? await response.json().catch(() => null) : null;
  asking.abort();
  if (response?.status === 401) return logIn("Your session has ended.");
  setStatus("No figures", "warn");
  trouble(explained({ status: response?.status ?? 0, ...answer?.error }));
  setTimeout(() => bar.hidden || document.hidden || open(), AGAIN);
}

function setStatus(text, tone) {
  live.textContent = text;
  live.className = `badge small ${tone}`;
}

function trouble(text) {
  const line = document.querySelector("#trouble");
  if (!line || line.textContent === text) return;
  line.textContent = text;
  line.hidden = !text;
}

// A hidden page takes no figures.
document.addEventListener("visibilitychange", () => {
  if (bar.hidden) return;
  document.hidden ? stop() : open();
});

// -- the switch --------------------------------------------------------------------------------------------------

const GATES = {
  switch: {
    field: "enabled",
    sure: ["Turn inference off?", "Every app gets 503 from now on. Running streams continue to their end.", "Turn off"],
  },
  approval: {
    field: "approved",
    sure: ["Withdraw the approval?", "Every app gets 503 from now on. Running streams continue to their end.", "Withdraw"],
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
