// Builds the pages' elements. Customers' text stays text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// In `properties`, `on…` adds a listener and other names set attributes. Null, undefined and false are ignored.
export const h = (tag, properties = {}, ...children) => dress(document.createElement(tag), properties, children);

export const svg = (tag, properties = {}, ...children) =>
  dress(document.createElementNS(SVG, tag), properties, children);

function dress(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

// Links only to web pages, because a customer's address may have another scheme, such as javascript:.
export const link = (address, text = address, style = null) =>
  /^https?:\/\//.test(address ?? "") ? h("a", { href: address, rel: "noreferrer", class: style }, text) : h("span", {}, text);

// Returns the focus to an element of a list that has been drawn again.
export const refocus = (list, name) => name && list.querySelector(`[data-focus="${CSS.escape(name)}"]`)?.focus();

// Shows a dialog, and resolves with the value with which it was closed.
export function showDialog(dialog) {
  const before = document.activeElement;
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (!before.isConnected) refocus(document, before.dataset.focus);
      resolve(dialog.returnValue);
    }),
  );
}

// A dialog ends with its view and with the session. This module's listeners are called before those of the page, so that
// the next view can take the focus.
function endDialogs() {
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close("");
}
for (const event of ["hashchange", "session-ended"]) addEventListener(event, endDialogs);

const LONGEST_PRESS = 2_000; // ms
let press = null; // { target, over }; `over` is a promise
let endPress = () => {};

addEventListener("pointerdown", ({ isPrimary, button, target }) => {
  if (!isPrimary || button) return;
  const begun = { target, over: new Promise((resolve) => (endPress = resolve)) };
  press = begun;
  begun.over.then(() => press === begun && (press = null));
  setTimeout(endPress, LONGEST_PRESS);
}, true);
for (const event of ["pointerup", "pointercancel"]) addEventListener(event, () => setTimeout(endPress), true); // after the click

// Returns whether the pointer is pressed, in the element if there is one.
export const isPressed = (element) => press !== null && (element?.contains(press.target) ?? true);

// Resolves once no pointer is pressed, because an element that is replaced under a press gets no click.
export async function untilReleased() {
  while (press) await press.over;
}

// Rejects when the signal aborts.
export const pause = (milliseconds, signal) =>
  new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });

// Resolves as soon as the page is visible.
export const untilVisible = (signal) =>
  new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", resolve, { once: true, signal });
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
