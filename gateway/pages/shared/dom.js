// Builds the pages' elements. What customers wrote arrives here as text, and stays text: nothing parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// `properties`: `on…` is a listener, `class` and the rest attributes; null, undefined and false are left out.
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

// An address that somebody chose is a link only when it leads to a web page.
export const link = (address, text = address) =>
  /^https?:\/\//.test(address ?? "") ? h("a", { href: address, rel: "noreferrer" }, text) : h("span", {}, text);

// Waits; rejects when the signal says so.
export const pause = (milliseconds, signal) =>
  new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });

// Resolves at once while the page can be seen, else when it can be seen again.
export const seen = (signal) =>
  new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", resolve, { once: true, signal });
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
