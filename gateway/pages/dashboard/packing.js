// Packs the files that a user drops or chooses as a tar.gz, in the browser. Archives and single pages stay as they are.

import { Refused } from "./api.js";

const MAX_FILES = 50_000;
const MAX_BYTES = 1_073_741_824; // before compression
const MAX_PACKED = 104_857_600;
// Never published: repositories, installed packages, secrets, and the files of the system.
const SECRETS = /[.#~]*\.(env|dev\.vars)(?!\.(example|sample|template)$)(rc|s)?([^a-z].*)?/; // as in the command line
const IGNORED = new RegExp(`^(\\.git|node_modules|\\.capsule|\\.DS_Store|Thumbs\\.db|__MACOSX|${SECRETS.source})$`, "i");
const TYPES = [
  [/\.html?$/i, "text/html"],
  [/\.zip$/i, "application/zip"],
  [/\.(tgz|tar\.gz)$/i, "application/gzip"],
];
const BLOCK = 512;
const encoder = new TextEncoder();

const refuse = (message) => new Refused(400, { message });

// Resolves with the files of a drop: { path, file, alone }. Call it during the event, because the browser forgets the
// items after it. The files of a single folder are relative to it. `alone` marks a file that was dropped by itself.
export async function readDrop(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  if (!entries.length) return readChosen(transfer.files);
  const alone = entries.length === 1;
  const found = [];
  for (const entry of entries) await walk(entry, alone && entry.isDirectory ? "" : entry.name, alone, found);
  return found;
}

async function walk(entry, path, alone, found) {
  if (IGNORED.test(entry.name)) return;
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    found.push({ path, file, alone });
    if (found.length > MAX_FILES) throw refuse(`A source has at most ${MAX_FILES} files.`);
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) return; // it reads a hundred at a time
    for (const each of entries) await walk(each, path ? `${path}/${each.name}` : each.name, false, found);
  }
}

// Returns the files of an input. Those of a folder are relative to it.
export const readChosen = (files) =>
  [...files].map((file) => {
    const folder = file.webkitRelativePath;
    return { path: folder ? folder.slice(folder.indexOf("/") + 1) : file.name, file, alone: !folder && files.length === 1 };
  });

// Resolves with what to upload: { body, type, count }.
export async function pack(files) {
  const type = files.length === 1 && files[0].alone && TYPES.find(([name]) => name.test(files[0].path))?.[1];
  if (type) return check({ body: files[0].file, type, count: 1 });
  const kept = files.filter(({ path }) => !path.split("/").some((name) => IGNORED.test(name)));
  if (!kept.length) throw refuse("There is nothing to publish: the folder is empty, or has only files that are left out.");
  if (kept.length > MAX_FILES) throw refuse(`A source has at most ${MAX_FILES} files.`);
  if (kept.reduce((sum, { file }) => sum + file.size, 0) > MAX_BYTES) throw refuse("A source has at most 1 GiB.");
  const tar = new Blob([...kept.flatMap(({ path, file }) => entry(path, file)), new Uint8Array(2 * BLOCK)]);
  try {
    const body = await new Response(tar.stream().pipeThrough(new CompressionStream("gzip"))).blob();
    return check({ body, type: "application/gzip", count: kept.length });
  } catch (error) {
    throw error instanceof Refused ? error : refuse("A file could not be read. Was it changed or removed? Try again.");
  }
}

function check(packed) {
  if (!packed.body.size) throw refuse("The file is empty.");
  if (packed.body.size > MAX_PACKED) throw refuse("A packed source has at most 100 MiB. Leave out files, and try again.");
  return packed;
}

// Returns the parts of a file in a tar: its header, its content, and zeros up to a whole block.
function entry(path, file) {
  const parts = [header(path, file.size, "0"), file, padding(file.size)];
  if (path.length <= 100 && /^[\x20-\x7e]*$/.test(path)) return parts;
  const record = encoder.encode(paxRecord("path", path));
  return [header("PaxHeader", record.length, "x"), record, padding(record.length), ...parts];
}

const padding = (size) => new Uint8Array(-size & (BLOCK - 1));

// The length in a record counts its own digits.
function paxRecord(name, value) {
  const rest = ` ${name}=${value}\n`;
  const size = encoder.encode(rest).length;
  let length = size + String(size).length;
  length = size + String(length).length;
  return length + rest;
}

function header(path, size, kind) {
  const block = new Uint8Array(BLOCK);
  const put = (at, text) => block.set(encoder.encode(text), at);
  block.set(encoder.encode(path).subarray(0, 100), 0);
  put(100, "0000644\0" + "0000000\0".repeat(2));
  put(124, `${size.toString(8).padStart(11, "0")}\0${"0".repeat(11)}\0${" ".repeat(8)}${kind}`);
  put(257, "ustar\0" + "00");
  const sum = block.reduce((total, byte) => total + byte, 0);
  put(148, `${sum.toString(8).padStart(6, "0")}\0 `);
  return block;
}
