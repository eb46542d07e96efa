// Switches between the views of a page: what follows "#" in the address names the view.

import { isPressed, untilReleased } from "/pages/dom.js";
import { Refused } from "./api.js";
import { skeleton } from "./parts.js";

const nothing = {
  title: "Not found",
  draw() {
    throw new Refused(404);
  },
};

// `routes` are pairs of a pattern and a view, which gets the pattern's named groups and the address's query. `place`
// holds the view, and `put(drawn)` puts it there. `product` ends the title of the document. `before(path)` is called
// when a view begins to load, `after(view)` once it is shown, and `fail(error)` if it cannot be drawn.
export function views({ routes, place, put, product, before, after, fail }) {
  let leaving = new AbortController();

  // Ends the present view. The signal that it returns aborts when the next one ends.
  function leave() {
    leaving.abort();
    leaving = new AbortController();
    place.removeAttribute("aria-busy");
    return leaving.signal;
  }

  // A view draws itself once its data has arrived. `signal` aborts when another view replaces it.
  async function show({ focus = true } = {}) {
    const [path, query] = location.hash.slice(1).split("?");
    const signal = leave();
    const [route, view] = routes.find(([route]) => route.test(path)) ?? [/^/, nothing];
    before(path);
    document.title = `${view.title} · ${product}`;
    const slow = setTimeout(() => isPressed() || put(skeleton(view.title)), 150);
    place.setAttribute("aria-busy", "true");
    try {
      const drawn = await view.draw(signal, path.match(route)?.groups ?? {}, new URLSearchParams(query));
      await untilReleased();
      if (signal.aborted) return;
      put(drawn);
      after(view);
      if (focus) place.querySelector("h1").focus();
    } catch (error) {
      if (!signal.aborted) fail(error);
    } finally {
      clearTimeout(slow);
      if (!signal.aborted) place.removeAttribute("aria-busy");
    }
  }

  return { leave, show };
}

// Leads past the navigation to the page's content.
export function watchSkipLink(main) {
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
}
