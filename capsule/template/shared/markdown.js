// Renders a model's Markdown as elements. Nothing here parses HTML, and links lead only to web pages.
// While an answer grows, only the blocks that changed are redrawn.

const FENCE = /^ {0,3}```/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^ *(?:[-*+]|(\d{1,9})[.)]) +(.*)$/;
const INLINE =
  /`([^`]+)`|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=\S)([^*]+?)\*(?!\w)|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** @type {WeakMap<Element, string>} */
const sources = new WeakMap();

/**
 * @param {Element} element whose children become the blocks
 * @param {string} text
 */
export function show(element, text) {
  const blocks = split(text);
  blocks.forEach((block, n) => {
    const old = element.children[n];
    if (old && sources.get(old) === block) return;
    const drawn = draw(block);
    sources.set(drawn, block);
    old ? old.replaceWith(drawn) : element.append(drawn);
  });
  while (element.children.length > blocks.length) element.lastElementChild?.remove();
}

/** @param {string} text @returns {string[]} paragraphs, lists, headings and fenced code */
function split(text) {
  /** @type {string[][]} */
  const blocks = [];
  /** @type {string[] | undefined} */
  let block;
  let fenced = false;
  const begin = () => blocks.push((block = []));
  for (const line of text.split("\n")) {
    if (fenced) {
      block?.push(line);
      if (FENCE.test(line)) (fenced = false), (block = undefined);
    } else if (FENCE.test(line)) {
      begin();
      block?.push(line);
      fenced = true;
    } else if (!line.trim()) {
      block = undefined;
    } else {
      const alone = HEADING.test(line);
      const listed = ITEM.test(line);
      if (!block || alone || (listed && !ITEM.test(block[0] ?? ""))) begin();
      block?.push(line);
      if (alone) block = undefined;
    }
  }
  return blocks.map((lines) => lines.join("\n"));
}

/** @param {string} block @returns {Element} */
function draw(block) {
  const [first = "", ...rest] = block.split("\n");
  if (FENCE.test(first)) {
    if (FENCE.test(rest.at(-1) ?? "")) rest.pop();
    const code = document.createElement("pre");
    code.tabIndex = 0; // so that the keyboard can scroll it
    code.append(dress("code", [rest.join("\n")]));
    return code;
  }
  const heading = HEADING.exec(first);
  if (heading) return dress("h3", inline(heading[2] ?? ""));
  const item = ITEM.exec(first);
  if (item) return list(block, item[1]);
  return dress("p", inline(block));
}

/** @param {string} block @param {string | undefined} start the first number, or undefined for bullets */
function list(block, start) {
  const element = document.createElement(start ? "ol" : "ul");
  if (start && start !== "1") element.setAttribute("start", start);
  for (const line of block.split("\n")) {
    const item = ITEM.exec(line);
    if (item) element.append(dress("li", inline(item[2] ?? "")));
    else element.lastElementChild?.append(" ", ...inline(line.trim()));
  }
  return element;
}

/** @param {string} text @returns {(Node | string)[]} */
function inline(text) {
  /** @type {(Node | string)[]} */
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, strong, emphasis, label, address] = match;
    parts.push(text.slice(end, match.index));
    end = match.index + whole.length;
    if (code !== undefined) parts.push(dress("code", [code]));
    else if (strong !== undefined) parts.push(dress("strong", inline(strong)));
    else if (emphasis !== undefined) parts.push(dress("em", inline(emphasis)));
    else {
      const link = dress("a", [label ?? ""]);
      link.setAttribute("href", address ?? "");
      link.setAttribute("rel", "noreferrer nofollow");
      parts.push(link);
    }
  }
  parts.push(text.slice(end));
  return parts;
}

/** @param {string} name @param {(Node | string)[]} children */
function dress(name, children) {
  const element = document.createElement(name);
  if (name !== "code") element.dir = "auto";
  element.append(...children);
  return element;
}
