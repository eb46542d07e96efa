/**
 * Asks the model and resolves to the complete answer. Rejects with an {@link AiError}.
 *
 * Thinking and answer share the output token limit. If thinking takes all of it, the promise rejects with code
 * `ANSWER_EMPTY`. A lower `effort` leaves more for the answer; without it, the model's own default applies.
 */
export function complete(prompt: string, options?: { effort?: Effort | undefined }): Promise<string>;

/**
 * Asks the model, passes each token to `onToken` as it arrives, and resolves to the complete answer.
 *
 * `onToken` may return a promise; the next token waits for it. If `onToken` throws, the request ends and the
 * returned promise rejects with the same error. An abort rejects with the signal's reason, by default an
 * `AbortError`. All other failures reject with an {@link AiError}. If the answer is cut off, the promise rejects with
 * code `STREAM_CUT`; it never resolves to an incomplete answer. `ANSWER_EMPTY` and `effort` are those of `complete`.
 *
 * `onDone` is called once, after the last token. `finishReason` is `length` if the answer was cut at the output token
 * limit. It is also called before a rejection with `ANSWER_EMPTY`. If `onDone` throws, the returned promise rejects with
 * the same error.
 */
export function streamComplete(
  prompt: string,
  onToken: (token: string) => void | PromiseLike<void>,
  options?: {
    signal?: AbortSignal | undefined;
    onDone?: ((end: AnswerEnd) => void) | undefined;
    effort?: Effort | undefined;
  },
): Promise<string>;

/** How much the model thinks before it answers. */
export type Effort = "low" | "medium" | "high";

export interface AnswerEnd {
  model: string;
  finishReason: "stop" | "length" | (string & {});
  /** In tokens. Null if the provider did not report them. */
  usage: { inputTokens: number; outputTokens: number } | null;
}

export class AiError extends Error {
  constructor(code: AiErrorCode, message: string, details?: AiErrorDetails);
  readonly name: "AiError";
  readonly code: AiErrorCode;
  /** The HTTP status. Undefined if there was no response, or if a stream failed partway. */
  readonly status: number | undefined;
  /** Seconds to wait before trying again. Undefined if waiting does not help, or if the time is unknown. */
  readonly retryAfter: number | undefined;
  /** Identifies the request in the service's logs. */
  readonly requestId: string | undefined;
}

export interface AiErrorDetails {
  status?: number | undefined;
  retryAfter?: number | undefined;
  requestId?: string | undefined;
  cause?: unknown;
}

export type AiErrorCode =
  // from this module
  | "INFERENCE_DISABLED" // also from the service, with status 503
  | "TOKEN_UNAVAILABLE"
  | "NETWORK_ERROR"
  | "STREAM_CUT"
  | "ANSWER_UNEXPECTED"
  | "ANSWER_EMPTY"
  // from the service
  | "APP_NOT_FOUND"
  | "APP_SUSPENDED"
  | "TOKEN_MISSING"
  | "TOKEN_INVALID"
  | "APP_BACKEND_UNREACHABLE"
  | "TOKENS_LIMITED"
  | "APP_RATE_LIMITED"
  | "USER_RATE_LIMITED"
  | "SPEND_CAP_REACHED"
  | "APP_CAP_REACHED"
  | "USER_CAP_REACHED"
  | "REQUEST_MALFORMED"
  | "REQUEST_TOO_LARGE"
  | "MODEL_NOT_ALLOWED"
  | "PROVIDER_REFUSED"
  | "PROVIDER_UNREACHABLE"
  | "PROVIDER_ERROR"
  | "PROVIDER_TIMEOUT"
  | "PROVIDER_QUOTA_EXHAUSTED"
  | "BACKBONE_UNAVAILABLE"
  // future codes
  | (string & {});
