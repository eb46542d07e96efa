import { announce, find, stamp } from "./dom.ts";
import { call, Refused } from "./session.ts";

export interface Note {
  id: number;
  text: string;
  updatedAt: number; // in milliseconds since 1970
}

const time = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/** Shows the user's notes, and lets the user write, change and delete them. */
export function startNotes(askAbout: (text: string) => void) {
  const section = find("#notes", HTMLElement);
  const form = find("#write", HTMLFormElement);
  const label = find("label", HTMLElement, form);
  const text = find("textarea", HTMLTextAreaElement, form);
  const fault = find(".fault", HTMLElement, form);
  const save = find("[type=submit]", HTMLButtonElement, form);
  const cancel = find("#cancel", HTMLButtonElement, form);
  const undo = find("#undo", HTMLElement);
  const list = find("#list", HTMLUListElement);
  let notes: Note[] = [];
  let edited: Note | undefined;
  let deleted: Note | undefined;

  async function load(): Promise<void> {
    await attempt(async () => {
      let before: Note[];
      let found: Note[];
      do {
        before = notes;
        found = await call<Note[]>("GET", "/api/notes");
      } while (notes !== before); // a note was saved or deleted meanwhile, and the answer may be older
      notes = found;
    });
    draw();
  }

  async function add(words: string): Promise<void> {
    put(await call<Note>("POST", "/api/notes", { text: words }));
    announce("The note is saved.");
  }

  async function change({ id }: Note, words: string): Promise<void> {
    put(await call<Note>("PUT", `/api/notes/${id}`, { text: words }));
    announce("The note is changed.");
  }

  async function remove(note: Note): Promise<void> {
    await call("DELETE", `/api/notes/${note.id}`);
    notes = notes.filter(({ id }) => id !== note.id);
    if (edited?.id === note.id) edit(undefined);
    deleted = note;
    draw();
    announce("The note is deleted.");
    find("button", HTMLButtonElement, undo).focus();
  }

  /** Puts a new or changed note on top. */
  function put(note: Note): void {
    notes = [note, ...notes.filter(({ id }) => id !== note.id)];
    deleted = undefined;
    draw();
  }

  function edit(note: Note | undefined): void {
    edited = note;
    text.value = note?.text ?? "";
    label.textContent = note ? "Change the note" : "New note";
    save.textContent = note ? "Save changes" : "Save note";
    cancel.hidden = !note;
    fault.textContent = "";
  }

  function draw(): void {
    list.replaceChildren(...notes.map(drawNote));
    find("#none", HTMLElement).hidden = notes.length > 0;
    undo.hidden = !deleted;
  }

  function drawNote(note: Note): HTMLElement {
    const item = stamp("#note");
    find("p", HTMLElement, item).textContent = note.text;
    const when = find("time", HTMLTimeElement, item);
    when.dateTime = new Date(note.updatedAt).toISOString();
    when.textContent = time.format(note.updatedAt);
    const on = (name: string, act: () => void) =>
      find(`[data-do=${name}]`, HTMLButtonElement, item).addEventListener("click", act);
    on("ask", () => askAbout(note.text));
    on("remove", () => attempt(() => remove(note)));
    on("edit", () => {
      edit(note);
      section.scrollTop = 0;
      text.focus();
    });
    return item;
  }

  /** Runs an action, and says beside the form why it failed. */
  async function attempt(action: () => Promise<void>): Promise<void> {
    fault.textContent = "";
    try {
      await action();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return location.reload(); // the session has ended
      const offline = "The app does not answer. Check your connection, and try again.";
      fault.textContent = error instanceof Refused ? error.message : offline;
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [written, note] = [text.value, edited];
    const words = written.trim();
    if (!words || save.disabled) return;
    save.disabled = true;
    await attempt(async () => {
      await (note ? change(note, words) : add(words));
      // Meanwhile the user may have written more, or opened another note.
      if (text.value === written && edited === note) edit(undefined);
    });
    save.disabled = false;
    text.focus();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape" && edited) edit(undefined);
  });
  cancel.addEventListener("click", () => {
    edit(undefined);
    text.focus();
  });
  find("button", HTMLButtonElement, undo).addEventListener("click", () =>
    attempt(async () => {
      if (deleted) await add(deleted.text);
      text.focus();
    }),
  );
  return { load, add };
}
