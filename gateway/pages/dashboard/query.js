// Keeps a view's choices in the page's address, and saves its rows as a file.

import { h } from "/pages/dom.js";

// Does not add to the history and does not draw the view again.
export function keepQuery(choices) {
  const query = new URLSearchParams(Object.entries(choices).filter(([, value]) => value));
  const path = location.hash.split("?")[0] || "#/";
  history.replaceState(null, "", query.size ? `${path}?${query}` : path);
}

export const readQuery = () => Object.fromEntries(new URLSearchParams(location.hash.split("?")[1]));

export function saveCsv(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  h("a", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}
