// Calls the account API, with the session's cookie.

export class Refused extends Error {
  constructor(status, { code = "", message = "", requestId = "" } = {}, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfter });
  }
}

// Resolves with the answer's JSON, or null if it is empty. Rejects with Refused, whose status is 0 if nobody answered.
export async function call(method, path, options) {
  return parsed(await send(method, path, options));
}

async function send(method, path, { body, signal } = {}) {
  const json = body === undefined || body instanceof Blob ? body : JSON.stringify(body);
  const headers = json === body ? {} : { "Content-Type": "application/json" };
  let response, text;
  try {
    response = await fetch(path, { method, headers, body: json, signal, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused(0);
  }
  if (response.ok) return text;
  throw new Refused(response.status, parsed(text)?.error, Number(response.headers.get("Retry-After")) || null);
}

function parsed(text) {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return null; // not JSON: a proxy's answer
  }
}

export const get = (path, signal) => call("GET", path, { signal });

export const getText = (path, signal) => send("GET", path, { signal });

// Resolves with null for a 404.
export const getIfThere = (path, signal) =>
  get(path, signal).catch((error) => {
    if (error.status === 404) return null;
    throw error;
  });
