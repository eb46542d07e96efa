// Which files of a folder are not published, as in the command line (`source.py`): those that .gitignore and
// .capsuleignore exclude, in every folder, with git's rules; and some that never are.

const SECRETS = /[.#~]*\.(env(?!\.production$)|dev\.vars)(?!\.(example|sample|template)$)(rc|s)?([^a-z].*)?/;
const CACHES = /__pycache__|.*\.pyc|\.(pytest_|mypy_|ruff_|parcel-|eslint)?cache|\.tox|\.nox|\.turbo|\.ipynb_checkpoints/;
const ADDED = /__MACOSX|\.DS_Store|Thumbs\.db|\._.*/; // by macOS and Windows
const NAMES = [/\.git|node_modules|\.?venv|\.capsule/, CACHES, ADDED, SECRETS].map(({ source }) => source).join("|");
const ALWAYS = new RegExp(`^(${NAMES})$`, "i");
const ENVIRONMENT = "pyvenv.cfg"; // at the top of each virtual environment of Python
const IGNORE_FILES = [".gitignore", ".capsuleignore"]; // a rule of the second takes precedence

export class IgnoredFiles {
  #rules = new Map(); // by folder: its rules in the order in which they are written
  #environments = new Set();
  #known = new Map(); // whether a folder is ignored

  // Reads the ignore files among the files, given as { path, file }. Call it before asking about a file in their folders.
  async read(files) {
    for (const { path } of files) if (nameOf(path) === ENVIRONMENT) this.#environments.add(folderOf(path));
    for (const wanted of IGNORE_FILES) {
      for (const { path, file } of files) {
        if (nameOf(path) !== wanted) continue;
        const folder = folderOf(path);
        this.#rules.set(folder, [...(this.#rules.get(folder) ?? []), ...parse(decode(new Uint8Array(await file.arrayBuffer())))]);
      }
    }
  }

  // Returns whether a file or a folder above it is ignored.
  has(path) {
    const parent = folderOf(path);
    return (parent !== "" && this.hasFolder(parent)) || this.#excludes(path, false);
  }

  hasFolder(path) {
    if (path === "") return false;
    if (!this.#known.has(path)) this.#known.set(path, this.hasFolder(folderOf(path)) || this.#excludes(path, true));
    return this.#known.get(path);
  }

  #excludes(path, isFolder) {
    if (ALWAYS.test(nameOf(path)) || (isFolder && this.#environments.has(path))) return true;
    // The nearest folder with a rule that matches decides.
    for (let folder = folderOf(path); ; folder = folderOf(folder)) {
      const inside = folder ? path.slice(folder.length + 1) : path;
      const rule = this.#rules.get(folder)?.findLast(({ pattern, folders }) => (isFolder || !folders) && pattern.test(inside));
      if (rule) return !rule.keeps;
      if (!folder) return false;
    }
  }
}

// Whether files of this name say what is ignored.
export const decides = (name) => name === ENVIRONMENT || IGNORE_FILES.includes(name);

// By the byte order mark: PowerShell writes UTF-16. The decoder leaves out the mark.
function decode(bytes) {
  const mark = `${bytes[0]} ${bytes[1]}`;
  return new TextDecoder({ "255 254": "utf-16le", "254 255": "utf-16be" }[mark]).decode(bytes);
}

const nameOf = (path) => path.slice(path.lastIndexOf("/") + 1);
const folderOf = (path) => path.slice(0, Math.max(path.lastIndexOf("/"), 0));

// Returns the rules of an ignore file: { pattern, folders, keeps }.
function parse(text) {
  return text
    .split("\n")
    .map((line) => line.replace(/\r$/, "").replace(/^((?:\\.|[^\\])*?) +$/, "$1"))
    .filter((line) => line && !line.startsWith("#"))
    .flatMap((line) => compile(line) ?? []);
}

function compile(line) {
  const keeps = line.startsWith("!");
  const rule = keeps ? line.slice(1) : line;
  const folders = /[^\\]\/$/.test(rule);
  const path = folders ? rule.slice(0, -1) : rule;
  const isBound = path.includes("/"); // to the folder of the ignore file
  const parts = path.replace(/^\//, "").split("/");
  try {
    const body = parts.map((part, n) => translate(part, n === parts.length - 1)).join("");
    return { pattern: new RegExp(`^${isBound ? "" : "(?:.*/)?"}${body}$`, "s"), folders, keeps };
  } catch {
    return null; // such as a range in the wrong order, which matches nothing
  }
}

// Returns the pattern of a part of a path, with the slash that follows it.
function translate(part, isLast) {
  if (part === "**") return isLast ? ".+" : "(?:.*/)?";
  const tokens = part.match(/\\.|\[[!^]?\]?(?:\\.|[^\]\\])*\]|\*+|[^]/g) ?? [];
  return tokens.map(translateToken).join("") + (isLast ? "" : "/");
}

function translateToken(token) {
  if (token[0] === "*") return "[^/]*";
  if (token === "?") return "[^/]";
  if (token.length > 1 && token[0] === "[") return `(?!/)${translateClass(token.slice(1, -1))}`;
  return escape(token.length > 1 && token[0] === "\\" ? token.slice(1) : token);
}

const escape = (text) => text.replace(/[-.*+?^${}()|[\]\\/]/g, "\\$&");

function translateClass(content) {
  const not = /^[!^]/.test(content);
  const members = (not ? content.slice(1) : content).replace(/\\(.)|([[\]^])/g, (_, escaped, plain) => escape(escaped ?? plain));
  return `[${not ? "^" : ""}${members}]`;
}
