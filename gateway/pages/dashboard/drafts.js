// Keeps what was typed when the session ended, and the view in which it was. After the next log-in both are there again.
//
// A draft is { account, address, fields }, and a field { id, value, secret }. It stays in the page's memory. While a person
// signs in at the provider, the tab's storage has it, but no secret.

import { currentSession } from "./session.js";

const STORED = "capsule-draft"; // key in the tab's storage

const typed = new WeakSet(); // controls that the user has changed
let draft = null;

addEventListener("input", ({ target }) => typed.add(target));

// Views and sheets keep what their controls with an id have. Those marked with `data-secret` are not stored, like passwords.
export function keepDraft() {
  const controls = [...document.querySelectorAll("main [id], dialog [id]")].filter((each) => typed.has(each));
  const field = (control) => ({ id: control.id, value: valueOf(control), secret: isSecret(control) });
  draft = { account: currentSession().account, address: location.hash, fields: controls.map(field) };
}

const valueOf = (control) => (control.type === "checkbox" ? control.checked : control.value);
const isSecret = ({ type, dataset }) => type === "password" || "secret" in dataset;

// Call it before the page is left for the provider. Without access to the storage, the draft is lost.
export function storeDraft() {
  const { account = null, address = location.hash, fields = [] } = draft ?? {};
  try {
    sessionStorage.setItem(STORED, JSON.stringify({ account, address, fields: fields.filter(({ secret }) => !secret) }));
  } catch {
    // The browser denies it.
  }
}

// Opens the address of a stored draft, unless the page's address names a view.
export function loadDraft() {
  try {
    draft = JSON.parse(sessionStorage.getItem(STORED));
    sessionStorage.removeItem(STORED);
  } catch {
    draft = null;
  }
  if (draft && !location.hash) history.replaceState(null, "", draft.address || location.pathname);
}

// Fills the view that is shown now. Buttons whose `data-opens` names a missing control are pressed first. A sheet that opens
// later fills itself. Returns whether there was something to fill in.
export function restoreDraft() {
  if (!draft) return false;
  const { account, address, fields } = draft;
  if (account !== currentSession().account || address !== location.hash) draft = null;
  if (!draft || !fields.length) return false;
  fillFrom(document);
  const openers = new Set(draft.fields.map(({ id }) => document.querySelector(`main [data-opens~="${CSS.escape(id)}"]`)));
  for (const opener of openers) opener?.click();
  fillFrom(document);
  return true;
}

// Fills what the place has of the draft. A control's listeners follow, so that they show what belongs to its value.
export function fillFrom(place) {
  if (!draft) return;
  draft.fields = draft.fields.filter(({ id, value }) => {
    const control = place.querySelector(`main #${CSS.escape(id)}, dialog #${CSS.escape(id)}`);
    if (!control) return true;
    control.closest("details")?.setAttribute("open", "");
    control.type === "checkbox" ? (control.checked = value) : (control.value = value);
    for (const name of ["input", "change"]) control.dispatchEvent(new Event(name, { bubbles: true }));
    return false;
  });
}
