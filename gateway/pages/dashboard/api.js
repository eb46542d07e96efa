// Calls the account API, with the session's cookie.

const DEADLINE = 6_000; // ms for an answer
const UPLOAD_DEADLINE = 600_000; // ms
const SILENCE = 10_000; // ms without data before a stream fails

export class Refused extends Error {
  constructor(status, { code = "", message = "", requestId = "" } = {}, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfter });
  }
}

// Resolves with the answer's JSON, or null if it is empty. Rejects with Refused, with status 0 if there was no answer.
export async function call(method, path, options) {
  return parseJson(await send(method, path, options));
}

// `reason` is an operator's, for the audit trail.
async function send(method, path, { body, accept, reason, signal: left, deadline: limit = DEADLINE } = {}) {
  const json = body === undefined || body instanceof Blob ? body : JSON.stringify(body);
  const headers = json === body ? {} : { "Content-Type": "application/json" };
  if (accept) headers.Accept = accept;
  if (reason) headers["X-Reason"] = encodeURIComponent(reason);
  const deadline = AbortSignal.timeout(body instanceof Blob ? UPLOAD_DEADLINE : limit);
  const signal = left ? AbortSignal.any([left, deadline]) : deadline;
  let response, text;
  try {
    response = await fetch(path, { method, headers, body: json, signal, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    throw left?.aborted ? error : new Refused(0);
  }
  if (response.ok) return text;
  throw toRefused(response, text);
}

// Calls `opened`, and then `take` with the new lines of a stream of events until it ends. The service sends data every three
// seconds.
export async function stream(path, left, take, opened = () => {}) {
  const silent = new AbortController();
  let timer = setTimeout(() => silent.abort(), SILENCE);
  try {
    const signal = AbortSignal.any([left, silent.signal]);
    const response = await fetch(path, { headers: { Accept: "text/event-stream" }, signal, cache: "no-store" });
    if (!response.ok) throw toRefused(response, await response.text());
    opened();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENCE);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      take(lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)));
    }
  } catch (error) {
    throw left.aborted || error instanceof Refused ? error : new Refused(0);
  } finally {
    clearTimeout(timer);
  }
}

// Uploads a file, and calls `progress` with the share that has been sent. `fetch` does not report progress.
export function upload(path, body, type, progress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path);
    request.timeout = UPLOAD_DEADLINE;
    request.setRequestHeader("Content-Type", type);
    request.upload.addEventListener("progress", ({ loaded, total }) => progress(total ? loaded / total : 0));
    request.addEventListener("load", () => {
      const { status, responseText } = request;
      if (status < 300) return resolve(parseJson(responseText));
      const wait = Number(request.getResponseHeader("Retry-After")) || null;
      reject(new Refused(status, parseJson(responseText)?.error, wait));
    });
    for (const failure of ["error", "timeout", "abort"]) request.addEventListener(failure, () => reject(new Refused(0)));
    signal.addEventListener("abort", () => request.abort(), { once: true });
    request.send(body);
  });
}

// Yields { event, data } of an answer of the model until it is complete. Rejects with Refused, also for one that breaks.
export async function* readEvents(path, body, token, signal) {
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
  let ended = false;
  try {
    const options = { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store", credentials: "omit" };
    const response = await fetch(path, options);
    if (!response.ok) throw toRefused(response, await response.text());
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    while (!ended) {
      const { done, value } = await reader.read();
      if (done) throw new Refused(0);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const { event, data } of blocks.map(parseEvent).filter(Boolean)) {
        if (event === "error") throw new Refused(502, data.error);
        ended = event === "done";
        yield { event, data };
      }
    }
  } catch (error) {
    throw signal.aborted || error instanceof Refused ? error : new Refused(0);
  }
}

function parseEvent(block) {
  const lines = block.split("\n");
  const read = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
  const data = parseJson(read("data"));
  return data && { event: read("event") ?? "token", data };
}

const toRefused = (response, text) =>
  new Refused(response.status, parseJson(text)?.error, Number(response.headers.get("Retry-After")) || null);

function parseJson(text) {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return null; // not JSON: a proxy's answer
  }
}

export const get = (path, signal) => call("GET", path, { signal });

export const getText = (path, signal, accept) => send("GET", path, { signal, accept });

// Resolves with null for a 404.
export const getIfThere = (path, signal) =>
  get(path, signal).catch((error) => {
    if (error.status === 404) return null;
    throw error;
  });
