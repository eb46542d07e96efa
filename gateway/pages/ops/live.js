// Receives the live figures from the gateway and draws them, and shows when they are out of date.

import { draw } from "./figures.js";
import { explain } from "./words.js";

const SILENCE = 7000; // ms without a snapshot; the gateway sends one every two seconds
const AGAIN = 3000; // ms before another attempt

const bar = document.querySelector(".top");
const live = document.querySelector("#live");
const view = document.querySelector("#view");
let source, heard, watching, last;

// Draws the last snapshot into a view that has just been opened. Until there is one, the view has no figures.
export function drawLast() {
  view.classList.toggle("waiting", !last);
  if (last) draw(last);
}

export function openStream() {
  stopStream();
  heard = Date.now();
  source = new EventSource("/ops/events");
  source.addEventListener("message", ({ data }) => {
    heard = Date.now();
    setStatus("Live", "good");
    showTrouble("");
    last = JSON.parse(data);
    drawLast();
  });
  source.addEventListener("away", () => {
    heard = Date.now();
    setStatus("No figures", "bad");
    showTrouble("Redis does not respond. New requests are refused; running streams continue. The figures below are out of date.");
  });
  // The browser reconnects by itself, unless the answer was not a stream.
  source.addEventListener("error", () => source.readyState === EventSource.CLOSED && showError());
  watching = setInterval(() => {
    if (Date.now() - heard < SILENCE) return;
    setStatus("No figures", "warn");
    showTrouble("The gateway has sent no figures for several seconds. The figures below are out of date.");
  }, 1000);
}

export function stopStream() {
  source?.close();
  clearInterval(watching);
}

// An EventSource hides the answer's status and body, so the request is repeated to read them.
async function showError() {
  const asking = new AbortController();
  const response = await fetch("/ops/events", { signal: asking.signal }).catch(() => null);
  const answer = response?.ok === false ? await response.json().catch(() => null) : null;
  asking.abort();
  if (response?.status === 401) return dispatchEvent(new Event("session-ended"));
  setStatus("No figures", "warn");
  showTrouble(explain({ status: response?.status ?? 0, ...answer?.error }));
  setTimeout(() => bar.hidden || document.hidden || openStream(), AGAIN);
}

function setStatus(text, tone) {
  live.textContent = text;
  live.className = `badge small ${tone}`;
}

export function showTrouble(text) {
  const line = document.querySelector("#trouble");
  if (line.textContent === text) return;
  line.textContent = text;
  line.hidden = !text;
}

// A hidden page receives no figures.
document.addEventListener("visibilitychange", () => {
  if (bar.hidden) return;
  document.hidden ? stopStream() : openStream();
});
