// Lists that come in pages, and the filters of a list.

import { h } from "/pages/dom.js";
import { count, plural } from "/pages/format.js";
import { get } from "/dashboard/api.js";
import { action, announce, empty, field, refusal, table } from "/dashboard/parts.js";
import { keepQuery } from "/dashboard/query.js";

const PAGE = 50;
const FEW = 10; // rows of a list that is part of a view

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

// The first rows of a list that is here already, with a filter by text and a button for more. The text is part of the
// address, so that it stays when a change draws the view again. `text(row)` is where the filter looks.
export function shortList({ id, rows, text, columns, label, filter, one, many = `${one}s` }, query) {
  const input = h("input", { id, type: "search", value: query.get(id) ?? "", autocomplete: "off", spellcheck: "false" });
  const here = h("div", { class: "stack" });
  let shown = FEW;
  const more = action("Show more", {}, refusal(), () => {
    shown += PAGE;
    draw();
    announce(`${plural(here.querySelectorAll("tbody tr").length, one, many)}.`);
  });
  const draw = () => {
    const wanted = input.value.trim().toLowerCase();
    const found = rows.filter((row) => text(row).toLowerCase().includes(wanted));
    const some = found.slice(0, shown);
    here.replaceChildren(
      found.length ? table(label, columns, some) : empty(`No such ${one}`, `None of the ${plural(rows.length, one, many)} matches “${wanted}”.`),
      h("div", { class: "row", hidden: rows.length <= FEW }, h("span", { class: "small quiet" }, `${count(some.length)} of ${plural(found.length, one, many)}`), found.length > shown && more),
    );
  };
  input.addEventListener("input", () => {
    shown = FEW;
    keepQuery({ ...Object.fromEntries(query), [id]: input.value.trim() });
    draw();
  });
  draw();
  return [rows.length > FEW && h("div", { class: "fields with-button snug" }, field(filter, input)), here];
}

// A form of filters. They are part of the address, so that going back leads to the same list. `controls` are inputs and
// selects by their labels; their ids are the names in the address. `kept` are names that the form does not change.
export function filters(view, button, controls, query, kept = []) {
  const chosen = (names) => names.map((name) => [name, query.get(name)]);
  const addressOf = (pairs) => {
    const given = new URLSearchParams(pairs.filter(([, value]) => value));
    return given.size ? `#/${view}?${given}` : `#/${view}`;
  };
  const inputs = Object.values(controls);
  const submit = (event) => {
    event.preventDefault();
    location.hash = addressOf([...chosen(kept), ...inputs.map(({ id, value }) => [id, value.trim()])]);
  };
  const fields = Object.entries(controls).map(([label, control]) => field(label, control));
  const filtered = inputs.length > 1 && inputs.some(({ id }) => query.get(id));
  return h(
    "form",
    { role: "search", onsubmit: submit },
    h(
      "div",
      { class: inputs.length > 1 ? "fields filters" : "fields with-button snug" },
      fields,
      h("button", {}, button),
      filtered && h("a", { href: addressOf(chosen(kept)) }, "Clear"),
    ),
  );
}

export const textFilter = (id, query, properties) =>
  h("input", { id, value: query.get(id) ?? "", autocomplete: "off", spellcheck: "false", ...properties });

export const search = (query) => textFilter("search", query, { type: "search" });

// `options` maps values to names. The first one is the default, and its value is empty.
export const choiceFilter = (id, options, query) =>
  h("select", { id }, Object.entries(options).map(([value, name]) => h("option", { value, selected: query.get(id) === value }, name)));
