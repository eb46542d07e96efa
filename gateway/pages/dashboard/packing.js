// Packs the files that a user drops or chooses as a tar.gz, in the browser. Archives and single pages stay as they are.

import { Refused } from "./api.js";
import { IgnoredFiles, decides } from "./ignored.js";

const MAX_FILES = 50_000;
const MAX_BYTES = 1_073_741_824; // before compression
const MAX_PACKED = 104_857_600;
const MAX_COUNTED = 10_000; // files that are left out of a drop
const TYPES = [
  [/\.html?$/i, "text/html"],
  [/\.zip$/i, "application/zip"],
  [/\.(tgz|tar\.gz)$/i, "application/gzip"],
];
const BLOCK = 512;
const encoder = new TextEncoder();

const refuse = (message) => new Refused(400, { message });

// Resolves with the files of a drop, { path, file, alone }, and how many were left out. Call it during the event, because
// the browser forgets the items after it. The files of a single folder are relative to it. `alone` marks a file that was
// dropped by itself.
export async function readDrop(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  if (!entries.length) return readChosen([...transfer.files]);
  const found = { files: [], omitted: 0, ignored: new IgnoredFiles() };
  const alone = entries.length === 1;
  if (alone && entries[0].isDirectory) await walk(await list(entries[0]), "", false, found);
  else await walk(entries, "", alone, found);
  return found;
}

async function walk(entries, folder, alone, found) {
  const { ignored, files } = found;
  const pathOf = ({ name }) => (folder ? `${folder}/${name}` : name);
  const open = async (entry) => ({ path: pathOf(entry), file: await new Promise((resolve, reject) => entry.file(resolve, reject)) });
  await ignored.read(await Promise.all(entries.filter(({ isFile, name }) => isFile && decides(name)).map(open)));
  if (ignored.hasFolder(folder)) return count(entries, found);
  for (const entry of entries) {
    if (!entry.isFile) await walk(await list(entry), pathOf(entry), false, found);
    else if (ignored.has(pathOf(entry))) found.omitted += 1;
    else if (files.push({ ...(await open(entry)), alone }) > MAX_FILES) throw tooMany();
  }
}

async function list(folder) {
  const reader = folder.createReader();
  const found = [];
  for (;;) {
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) return found; // it reads a hundred at a time
    found.push(...entries);
  }
}

async function count(entries, found) {
  for (const entry of entries) {
    if (found.omitted >= MAX_COUNTED) return;
    if (entry.isFile) found.omitted += 1;
    else await count(await list(entry), found);
  }
}

// Resolves with the files of an input, and how many were left out. Those of a folder are relative to it.
export async function readChosen(chosen) {
  const all = chosen.map((file) => {
    const folder = file.webkitRelativePath;
    return { path: folder ? folder.slice(folder.indexOf("/") + 1) : file.name, file, alone: !folder && chosen.length === 1 };
  });
  const ignored = new IgnoredFiles();
  await ignored.read(all);
  const files = all.filter(({ path }) => !ignored.has(path));
  return { files, omitted: all.length - files.length };
}

const tooMany = () => refuse(`A source has at most ${MAX_FILES} files.`);

// Resolves with what to upload: { body, type, count }.
export async function pack(files) {
  const type = files.length === 1 && files[0].alone && TYPES.find(([name]) => name.test(files[0].path))?.[1];
  if (type) return check({ body: files[0].file, type, count: 1 });
  if (!files.length) throw refuse("There is nothing to publish: the folder is empty, or has only files that are left out.");
  if (files.length > MAX_FILES) throw tooMany();
  if (files.reduce((sum, { file }) => sum + file.size, 0) > MAX_BYTES) throw refuse("A source has at most 1 GiB.");
  const tar = new Blob([...files.flatMap(({ path, file }) => entry(path, file)), new Uint8Array(2 * BLOCK)]);
  try {
    const body = await new Response(tar.stream().pipeThrough(new CompressionStream("gzip"))).blob();
    return check({ body, type: "application/gzip", count: files.length });
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
