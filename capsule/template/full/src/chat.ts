import { AiError, streamComplete } from "capsule-ai";
import { announce, find, stamp } from "./dom.ts";
import { show } from "./markdown.js";
import { type Turn, writePrompt } from "./prompt.ts";
import { openView } from "./views.ts";
import { explain } from "./words.js";

/** Lets the user ask the model, and shows each answer while it is written. */
export function startChat(saveNote: (text: string) => Promise<void>) {
  const form = find("#question", HTMLFormElement);
  const field = find("#prompt", HTMLTextAreaElement);
  const send = find("#send", HTMLButtonElement);
  const stop = find("#stop", HTMLButtonElement);
  const list = find("#turns", HTMLElement);
  const ideas = find("#ideas", HTMLElement);
  const again = find("#again", HTMLButtonElement);
  const about = find("#about", HTMLElement);
  const answered: Turn[] = [];
  let running: AbortController | undefined;
  let note: string | undefined;

  function setRunning(controller: AbortController | undefined): void {
    running = controller;
    const focused = document.activeElement === send || document.activeElement === stop;
    send.hidden = running !== undefined;
    stop.hidden = running === undefined;
    again.hidden = running !== undefined || !list.querySelector("article");
    if (focused) (running ? stop : send).focus();
  }

  async function ask(question: string): Promise<void> {
    const view = new TurnView(question, saveNote, () => run(view, prompt));
    const prompt = writePrompt(question, answered, note);
    setNote(undefined);
    ideas.hidden = true;
    list.append(view.element);
    await run(view, prompt);
  }

  async function run(view: TurnView, prompt: string): Promise<void> {
    if (running) return;
    const controller = new AbortController();
    setRunning(controller);
    view.begin();
    view.element.scrollIntoView({ block: "start" });
    announce("Asking");
    let isCut = false;
    try {
      await streamComplete(
        prompt,
        (token) => {
          const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
          view.write(token, () => follows && list.scrollTo({ top: list.scrollHeight }));
        },
        { signal: controller.signal, onDone: ({ finishReason }) => void (isCut = finishReason === "length") },
      );
      answered.push({ question: view.question, answer: view.text });
      view.end(isCut ? "Cut at the length limit" : "");
    } catch (error) {
      if (controller.signal.aborted) view.end("Stopped");
      else view.fail(error);
    }
    if (running === controller) setRunning(undefined);
    view.element.lastElementChild?.scrollIntoView({ block: "nearest" });
  }

  function setNote(text: string | undefined): void {
    note = text;
    about.hidden = note === undefined;
    find("span", HTMLElement, about).textContent = note ? `About “${note.slice(0, 60)}”` : "";
  }

  function askAbout(text: string): void {
    setNote(text);
    location.hash = "#ask";
    openView(); // on a phone, the field is not visible before
    field.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const question = field.value.trim();
    if (!question || running) return;
    field.value = "";
    ask(question);
  });
  field.addEventListener("keydown", (event) => {
    // While an input method is composing, Enter accepts its suggestion.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  stop.addEventListener("click", () => running?.abort());
  again.addEventListener("click", () => {
    answered.length = 0;
    list.replaceChildren(ideas);
    ideas.hidden = false;
    setRunning(undefined);
    field.focus();
  });
  find("button", HTMLButtonElement, about).addEventListener("click", () => {
    setNote(undefined);
    field.focus();
  });
  for (const idea of ideas.querySelectorAll("button")) {
    idea.addEventListener("click", () => {
      field.focus();
      ask(idea.textContent ?? "");
    });
  }
  return { askAbout };
}

/** One question with its answer, as the page shows it. */
class TurnView {
  readonly element = stamp("#turn");
  readonly question: string;
  text = "";
  private readonly answer = find(".answer", HTMLElement, this.element);
  private readonly trouble = find(".trouble", HTMLElement, this.element);
  private readonly retry = find(".trouble button", HTMLButtonElement, this.element);
  private readonly actions = find(".actions", HTMLElement, this.element);
  private drawing = 0;
  private countdown: ReturnType<typeof setInterval> | undefined;

  constructor(question: string, saveNote: (text: string) => Promise<void>, retry: () => void) {
    this.question = question;
    find(".question", HTMLElement, this.element).textContent = question;
    this.retry.addEventListener("click", retry);
    this.offer("copy", "Copied", () => navigator.clipboard.writeText(this.text));
    this.offer("keep", "Saved", () => saveNote(this.text));
  }

  begin(): void {
    clearInterval(this.countdown);
    this.text = "";
    this.answer.replaceChildren();
    this.answer.hidden = false;
    // A screen reader reads the whole answer once, instead of each token.
    this.answer.ariaBusy = "true";
    this.trouble.hidden = this.actions.hidden = true;
  }

  /** Draws once per frame, however many tokens arrive. */
  write(token: string, drawn: () => void): void {
    this.text += token;
    this.drawing ||= requestAnimationFrame(() => {
      this.draw();
      drawn();
    });
  }

  end(remark: string): void {
    this.draw();
    this.answer.ariaBusy = "false";
    this.answer.hidden = !this.text;
    find(".end", HTMLElement, this.element).textContent = remark;
    this.actions.hidden = false;
    for (const button of this.actions.querySelectorAll("button")) button.hidden = !this.text;
    announce(remark || "Answered");
  }

  fail(error: unknown): void {
    if (!(error instanceof AiError)) console.error(error);
    else if (error.cause) console.error(error.cause);
    const known = error instanceof AiError ? error : new AiError("", "Something on this page went wrong.");
    const { heading, advice, retry } = explain(known);
    this.end("");
    this.actions.hidden = !this.text;
    this.trouble.hidden = false;
    find("h3", HTMLElement, this.trouble).textContent = heading;
    find("p", HTMLElement, this.trouble).textContent = advice;
    this.retry.hidden = !retry;
    announce("");
    if (retry) this.waitFor(known.retryAfter ?? 0);
  }

  private draw(): void {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    show(this.answer, this.text);
  }

  /** Counts down on the button, outside the alert, so that a screen reader does not read each second. */
  private waitFor(seconds: number): void {
    const end = Date.now() + seconds * 1000;
    const tick = () => {
      const left = Math.ceil((end - Date.now()) / 1000);
      this.retry.disabled = left > 0;
      this.retry.textContent = left > 0 ? `Try again in ${duration(left)}` : "Try again";
      if (left <= 0) clearInterval(this.countdown);
    };
    this.countdown = setInterval(tick, 250);
    tick();
  }

  private offer(name: string, done: string, action: () => Promise<void>): void {
    const button = find(`[data-do=${name}]`, HTMLButtonElement, this.element);
    const label = button.textContent;
    button.addEventListener("click", async () => {
      button.textContent = await action().then(
        () => done,
        () => "Failed",
      );
      announce(button.textContent);
      setTimeout(() => (button.textContent = label), 2000);
    });
  }
}

function duration(seconds: number): string {
  if (seconds < 100) return `${seconds} s`;
  const minutes = Math.ceil(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.ceil(minutes / 60)} h`;
}
