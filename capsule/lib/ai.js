// Calls the language model through the service, without a provider key, dependencies or a build step.
// The address comes from the build (VITE_SERVICE_AI_URL), and the signed-in user's token from ./auth.js.
import { getToken } from "./auth.js";

/**
 * @typedef {import("./ai.d.ts").AiError} Declared
 * @implements {Declared}
 */
export class AiError extends Error {
  /**
   * @param {import("./ai.d.ts").AiErrorCode} code
   * @param {string} message
   * @param {import("./ai.d.ts").AiErrorDetails} [details]
   */
  constructor(code, message, { status, retryAfter, requestId, cause } = {}) {
    super(message, cause === undefined ? undefined : { cause });
    /** @type {"AiError"} */
    this.name = "AiError";
    this.code = code;
    this.status = status;
    this.retryAfter = retryAfter;
    this.requestId = requestId;
  }
}

/** @type {typeof import("./ai.d.ts").complete} */
export async function complete(prompt, { effort } = {}) {
  const response = await ask({ prompt, stream: false, reasoningEffort: effort }, "application/json");
  const body = await response.text().catch((cause) => {
    throw new AiError("NETWORK_ERROR", "The connection was lost before the answer was complete.", { cause });
  });
  const answer = parseJson(body);
  if (typeof answer?.text !== "string") throw unexpectedAnswer(response);
  if (!answer.text && answer.finishReason === "length") throw emptyAnswer(response);
  return answer.text;
}

/** @type {typeof import("./ai.d.ts").streamComplete} */
export async function streamComplete(prompt, onToken, { signal, onDone, effort } = {}) {
  const response = await ask({ prompt, stream: true, reasoningEffort: effort }, "text/event-stream", signal);
  let text = "";
  for await (const { type, data } of events(response, signal)) {
    const event = parseJson(data);
    if (type === "message" && typeof event?.token === "string") {
      text += event.token;
      await unlessAborted(onToken(event.token), signal);
    } else if (type === "done") {
      onDone?.({ model: event?.model ?? "", finishReason: event?.finishReason ?? "", usage: event?.usage ?? null });
      if (!text && event?.finishReason === "length") throw emptyAnswer(response);
      return text;
    } else if (type === "error") {
      throw serviceError(event?.error, response) ?? unexpectedAnswer(response);
    } else if (type === "message") {
      throw unexpectedAnswer(response);
    }
  }
  throw streamCut();
}

/**
 * @param {{ prompt: string, stream: boolean, reasoningEffort: import("./ai.d.ts").Effort | undefined }} question
 * @param {string} accept the media type that the response must have
 * @param {AbortSignal} [signal]
 */
async function ask(question, accept, signal) {
  signal?.throwIfAborted();
  const url = import.meta.env?.VITE_SERVICE_AI_URL;
  if (!url) throw new AiError("INFERENCE_DISABLED", "Managed inference was off when this app was built.");

  const token = await unlessAborted((async () => getToken())(), signal).catch((cause) => {
    signal?.throwIfAborted();
    throw new AiError("TOKEN_UNAVAILABLE", "The app could not get the user's token. Sign in again.", { cause });
  });
  const response = await fetch(url, {
    method: "POST",
    headers: {
      Accept: accept,
      "Content-Type": "application/json",
      ...(token && { Authorization: `Bearer ${token}` }),
    },
    body: JSON.stringify(question),
    cache: "no-store",
    credentials: "omit",
    signal: signal ?? null,
  }).catch((cause) => {
    signal?.throwIfAborted();
    throw new AiError("NETWORK_ERROR", "The service could not be reached. Check the connection.", { cause });
  });
  if (!response.ok) throw await readRefusal(response, signal);
  if (!response.headers.get("Content-Type")?.startsWith(accept)) {
    response.body?.cancel().catch(() => {});
    throw unexpectedAnswer(response);
  }
  return response;
}

/**
 * @param {Response} response
 * @param {AbortSignal} [signal]
 */
async function readRefusal(response, signal) {
  const body = await response.text().catch(() => "");
  signal?.throwIfAborted();
  // A proxy may respond with HTML or plain text. Then only the status is known.
  return serviceError(parseJson(body)?.error, response, response.status) ?? unexpectedAnswer(response);
}

/**
 * @param {ErrorBody | undefined} error
 * @param {Response} response
 * @param {number} [status]
 */
function serviceError(error, response, status) {
  if (!error?.code) return undefined;
  return new AiError(error.code, error.message ?? "", {
    status,
    retryAfter: seconds(response.headers.get("Retry-After")),
    requestId: error.requestId ?? response.headers.get("X-Request-Id") ?? undefined,
  });
}

/** @param {Response} response */
function unexpectedAnswer(response) {
  return new AiError("ANSWER_UNEXPECTED", `This response is not from the service (HTTP ${response.status}).`, {
    status: response.status,
    retryAfter: seconds(response.headers.get("Retry-After")),
    requestId: response.headers.get("X-Request-Id") ?? undefined,
  });
}

/** @param {Response} response */
function emptyAnswer(response) {
  const message = "The model reached the output token limit while it was thinking. Ask with less effort, or ask for less.";
  return new AiError("ANSWER_EMPTY", message, { requestId: response.headers.get("X-Request-Id") ?? undefined });
}

/** @param {unknown} [cause] */
function streamCut(cause) {
  return new AiError("STREAM_CUT", "The answer was cut off. Try again.", { cause });
}

/**
 * Reads server-sent events as the HTML standard defines them. EventSource cannot POST or send a token.
 * @param {Response} response
 * @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<{ type: string, data: string }, void, void>}
 */
async function* events(response, signal) {
  const reader = response.body?.getReader();
  if (!reader) return;
  const decoder = new TextDecoder();
  let rest = "";
  let afterCr = false;
  let type = "";
  /** @type {string[]} */
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      let text = decoder.decode(value, { stream: true });
      if (!text) continue;
      // A CR ends its line immediately. Waiting for an LF in the next read would delay a token.
      if (afterCr && text.startsWith("\n")) text = text.slice(1);
      afterCr = text.endsWith("\r");
      const lines = (rest + text).split(/\r\n|\r|\n/);
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line) {
          const colon = line.indexOf(":");
          const field = colon < 0 ? line : line.slice(0, colon);
          const content = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
          if (field === "data") data.push(content);
          else if (field === "event") type = content;
          continue;
        }
        if (data.length) yield { type: type || "message", data: data.join("\n") };
        type = "";
        data = [];
      }
    }
  } catch (cause) {
    signal?.throwIfAborted();
    throw streamCut(cause);
  } finally {
    // Cancel however reading ended: otherwise the model would continue at the account's expense.
    reader.cancel().catch(() => {});
  }
}

/**
 * Settles like `work`, or rejects when the signal aborts, because getToken and onToken do not take a signal.
 * @template T
 * @param {T | PromiseLike<T>} work
 * @param {AbortSignal} [signal]
 * @returns {Promise<T>}
 */
async function unlessAborted(work, signal) {
  if (!signal) return work;
  return new Promise((resolve, reject) => {
    const abort = () => reject(signal.reason);
    signal.addEventListener("abort", abort, { once: true });
    if (signal.aborted) abort();
    Promise.resolve(work)
      .then(resolve, reject)
      .finally(() => signal.removeEventListener("abort", abort));
  });
}

/**
 * @typedef {{ code?: string, message?: string, requestId?: string }} ErrorBody
 * @typedef {Partial<import("./ai.d.ts").AnswerEnd> & { text?: string, token?: string, error?: ErrorBody }} AnswerBody
 * @param {string} json
 * @returns {AnswerBody | undefined}
 */
function parseJson(json) {
  try {
    return JSON.parse(json);
  } catch {
    return undefined;
  }
}

/** @param {string | null} retryAfter in seconds or as an HTTP date */
function seconds(retryAfter) {
  if (!retryAfter) return undefined;
  if (/^\d+$/.test(retryAfter)) return Number(retryAfter);
  const wait = Math.ceil((Date.parse(retryAfter) - Date.now()) / 1000);
  return Number.isNaN(wait) ? undefined : Math.max(0, wait);
}
