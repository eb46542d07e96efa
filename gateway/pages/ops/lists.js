// A list that the service returns in pages, and a search field.

import { h } from "/pages/dom.js";
import { count, plural } from "/pages/format.js";
import { get } from "/dashboard/api.js";
import { action, announce, refusal, table } from "/dashboard/parts.js";

const PAGE = 50;

// `read(page)` returns the page's rows, `cursor` is the name of the paging parameter, and `one` names a row.
export function list({ path, query = {}, read, cursor, columns, one, many = `${one}s`, none }, signal) {
  const here = h("div", { class: "stack" });
  const line = refusal();
  const rows = [];
  let next = null;
  const more = action("Show more", {}, line, () => load());

  async function load() {
    const parameters = new URLSearchParams({ limit: PAGE, ...query });
    if (next) parameters.set(cursor, next);
    const page = await get(`${path}?${parameters}`, signal);
    const found = read(page);
    rows.push(...found);
    next = page.next ?? (cursor && Array.isArray(page) && found.length === PAGE ? found.at(-1).id : null);
    draw();
    announce(`${plural(rows.length, one, many)}${next ? ", and there may be more" : ""}.`);
  }

  function draw() {
    const had = document.activeElement === more;
    more.textContent = rows.length ? "Show more" : "Continue the search";
    const few = next ? `No match among the first 2,000 ${many}.` : none;
    here.replaceChildren(
      rows.length ? table(`${count(rows.length)} ${many}`, columns, rows) : h("p", { class: "empty" }, few),
      ...(next ? [h("div", { class: "row" }, more)] : []),
      line,
    );
    if (had && next) more.focus();
    else if (had) (here.tabIndex = -1), here.focus();
  }

  return load().then(() => here);
}

// A search field. Its text is part of the address, so that going back leads to the same list.
export function search(label, view, text) {
  const input = h("input", { id: "search", type: "search", value: text, autocomplete: "off", spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    const wanted = input.value.trim();
    location.hash = wanted ? `#/${view}?search=${encodeURIComponent(wanted)}` : `#/${view}`;
  };
  return h(
    "form",
    { role: "search", onsubmit: submit },
    h(
      "div",
      { class: "fields with-button snug" },
      h("div", { class: "field" }, h("label", { for: "search" }, label), input),
      h("button", {}, "Search"),
    ),
  );
}

