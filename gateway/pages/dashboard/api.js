// The account surface, asked with the session's cookie.

export class Refused extends Error {
  constructor(status, { code = "", message = "", requestId = "" } = {}, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfter });
  }
}

// What the answer's JSON says, null for an empty one. Rejects with Refused; status 0 is a service out of reach.
export async function call(method, path, { body, signal } = {}) {
  const json = body === undefined || body instanceof Blob ? body : JSON.stringify(body);
  const headers = json === body ? {} : { "Content-Type": "application/json" };
  let response, text;
  try {
    response = await fetch(path, { method, headers, body: json, signal, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    throw error.name === "AbortError" ? error : new Refused(0);
  }
  const told = parsed(text);
  if (response.ok) return told;
  throw new Refused(response.status, told?.error, Number(response.headers.get("Retry-After")) || null);
}

function parsed(text) {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return null; // of a proxy in between
  }
}

export const get = (path, signal) => call("GET", path, { signal });

// Null instead of a 404.
export const getIfThere = (path, signal) =>
  get(path, signal).catch((error) => {
    if (error.status === 404) return null;
    throw error;
  });
