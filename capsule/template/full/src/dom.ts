/** Returns the element that matches the selector, which the page must have. */
export function find<E extends Element>(selector: string, kind: new () => E, within: ParentNode = document): E {
  const found = within.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`The page has no ${selector}.`);
  return found;
}

/** Returns a copy of the first element in a template of the page. */
export function stamp(template: string): HTMLElement {
  const copy = find(template, HTMLTemplateElement).content.firstElementChild?.cloneNode(true);
  if (!(copy instanceof HTMLElement)) throw new Error(`The template ${template} is empty.`);
  return copy;
}

/** Lets a screen reader read the text. */
export function announce(text: string): void {
  find("#status", HTMLElement).textContent = text;
}
