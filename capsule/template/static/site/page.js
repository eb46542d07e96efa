import "./auth.js";
import { AiError, streamComplete } from "./lib/ai.js";
import { show } from "./markdown.js";
import { explain } from "./words.js";

/** @template {Element} E @param {string} selector @param {new () => E} kind @returns {E} */
function find(selector, kind) {
  const found = document.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`The page has no ${selector}.`);
  return found;
}

const main = find("main", HTMLElement);
const form = find("form", HTMLFormElement);
const question = find("#question", HTMLTextAreaElement);
const ask = find("#ask", HTMLButtonElement);
const stop = find("#stop", HTMLButtonElement);
const article = find("article", HTMLElement);
const promptHeading = find("#asked", HTMLElement);
const answer = find("#answer", HTMLElement);
const figures = find("#figures", HTMLElement);
const trouble = find("#trouble", HTMLElement);
const adviceText = find("#trouble p", HTMLElement);
const waitAnnouncement = find("#trouble p.unseen", HTMLElement);
const again = find("#again", HTMLButtonElement);
const status = find("#status", HTMLElement);
const copy = find("#copy", HTMLButtonElement);

/** @type {AbortController | undefined} */
let running;
let countdown = 0;
let text = ""; // the answer as the model wrote it

/** @param {"asking" | "answering" | "done" | "stopped" | "failed"} state */
function setState(state) {
  main.dataset["state"] = state;
  const busy = state === "asking" || state === "answering";
  // A screen reader reads the complete answer once, instead of each token.
  answer.ariaBusy = String(busy);
  const focused = document.activeElement === ask || document.activeElement === stop;
  ask.hidden = busy;
  stop.hidden = !busy;
  if (focused) (busy ? stop : ask).focus();
}

/** @param {string} prompt */
async function run(prompt) {
  running?.abort();
  const { signal } = (running = new AbortController());
  const clock = stopwatch();
  let cut = false;
  promptHeading.textContent = prompt;
  if (question.value.trim() === prompt) question.value = "";
  text = "";
  answer.replaceChildren();
  copy.hidden = true;
  figures.textContent = "Waiting for the first token";
  status.textContent = "Asking";
  article.hidden = false;
  hideTrouble();
  setState("asking");
  try {
    await streamComplete(
      prompt,
      (token) => {
        if (main.dataset["state"] === "asking") setState("answering");
        text += token;
        clock.tick();
        drawSoon(clock);
      },
      { signal, onDone: ({ finishReason }) => (cut = finishReason === "length") },
    );
    const summary = clock.summary();
    if (cut) finish("done", "The answer was cut at the length limit", `Cut at the length limit · ${summary}`);
    else finish("done", "Answered", summary);
  } catch (error) {
    // A newer question has replaced this one.
    if (running?.signal !== signal) return;
    if (signal.aborted) finish("stopped", "Stopped", `Stopped, charged as a full-length answer · ${clock.summary()}`);
    else fail(error, clock.summary());
  }
}

let drawing = 0;

/**
 * Draws once per frame, however many tokens arrive.
 * @param {ReturnType<typeof stopwatch>} clock
 */
function drawSoon(clock) {
  drawing ||= requestAnimationFrame(() => {
    const following = figures.getBoundingClientRect().top < innerHeight;
    drawNow();
    figures.textContent = clock.count();
    if (following) figures.scrollIntoView({ block: "nearest" });
  });
}

function drawNow() {
  cancelAnimationFrame(drawing);
  drawing = 0;
  show(answer, text);
}

/** @param {"done" | "stopped"} state @param {string} label @param {string} summary */
function finish(state, label, summary) {
  drawNow();
  setState(state);
  status.textContent = label;
  figures.textContent = summary;
  copy.hidden = !text;
}

/** @param {unknown} error @param {string} summary */
function fail(error, summary) {
  if (!(error instanceof AiError)) console.error(error);
  else if (error.cause) console.error(error.cause);
  const known = error instanceof AiError ? error : new AiError("", "Something on this page went wrong.");
  const { heading, advice, retry } = explain(known);
  drawNow();
  setState("failed");
  status.textContent = "";
  figures.textContent = text ? summary : "";
  copy.hidden = article.hidden = !text;
  trouble.hidden = false;
  find("#trouble h2", HTMLElement).textContent = heading;
  adviceText.textContent = advice;
  waitAnnouncement.textContent = known.retryAfter ? `You can try again in ${duration(known.retryAfter)}.` : "";
  again.hidden = !retry;
  if (!text) question.value ||= promptHeading.textContent ?? "";
  if (known.retryAfter && retry) countDown(known.retryAfter);
}

/** @param {number} seconds */
function duration(seconds) {
  if (seconds < 100) return `${seconds} s`;
  const minutes = Math.ceil(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.ceil(minutes / 60)} h`;
}

/**
 * Counts down on the button, outside the alert, so that a screen reader announces only the end.
 * @param {number} seconds
 */
function countDown(seconds) {
  const end = Date.now() + seconds * 1000;
  const tick = () => {
    const left = Math.ceil((end - Date.now()) / 1000);
    again.disabled = ask.disabled = left > 0;
    again.textContent = left > 0 ? `Try again in ${duration(left)}` : "Try again";
    if (left > 0) return;
    clearInterval(countdown);
    adviceText.textContent = "You can try again now.";
    waitAnnouncement.textContent = "";
  };
  countdown = setInterval(tick, 250);
  tick();
}

function hideTrouble() {
  clearInterval(countdown);
  again.disabled = ask.disabled = false;
  again.textContent = "Try again";
  trouble.hidden = true;
}

function stopwatch() {
  const start = performance.now();
  let tokens = 0;
  let first = 0;
  const count = () => `${tokens} ${tokens === 1 ? "token" : "tokens"}`;
  return {
    tick() {
      tokens += 1;
      first ||= performance.now() - start;
    },
    count,
    summary() {
      const writing = (performance.now() - start - first) / 1000;
      if (!tokens) return "no tokens yet";
      const speed = tokens > 1 && writing > 0 ? ` · ${Math.round((tokens - 1) / writing)} per second` : "";
      return `${count()} · first after ${Math.round(first)} ms${speed}`;
    },
  };
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = question.value.trim();
  if (prompt && !ask.disabled && !ask.hidden) run(prompt);
});

question.addEventListener("keydown", (event) => {
  // While an input method is composing, Enter accepts its suggestion.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !stop.hidden) running?.abort();
});

stop.addEventListener("click", () => running?.abort());
copy.addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = "Copied";
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  } catch {
    getSelection()?.selectAllChildren(answer);
    status.textContent = "Selected. Copy it with your keyboard.";
  }
});
again.addEventListener("click", () => {
  run(promptHeading.textContent ?? "");
  question.focus();
});

for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => {
    question.value = idea.textContent ?? "";
    question.focus();
    form.requestSubmit();
  });
}
