/** Asks the model; resolves to the whole answer. Rejects with an {@link AiError}. */
export function complete(prompt: string): Promise<string>;

/**
 * Asks the model and hands over each token as it arrives; resolves to the whole answer.
 *
 * `onToken` may return a promise: the next token waits for it. What it throws ends the request, and the
 * returned promise rejects with it. An abort rejects with the signal's reason: the platform's `AbortError`,
 * unless another was given. Everything else is an {@link AiError}. An answer that breaks off rejects with code
 * `STREAM_CUT`; it never resolves to a part.
 */
export function streamComplete(
  prompt: string,
  onToken: (token: string) => void | PromiseLike<void>,
  options?: { signal?: AbortSignal | undefined },
): Promise<string>;

export class AiError extends Error {
  constructor(code: AiErrorCode, message: string, details?: AiErrorDetails);
  readonly name: "AiError";
  readonly code: AiErrorCode;
  /** The HTTP status; undefined where no answer came, and for a failure in the middle of a stream. */
  readonly status: number | undefined;
  /** Seconds until asking again can help; undefined where waiting does not, or nothing is known. */
  readonly retryAfter: number | undefined;
  /** What support needs to find the request. */
  readonly requestId: string | undefined;
}

export interface AiErrorDetails {
  status?: number | undefined;
  retryAfter?: number | undefined;
  requestId?: string | undefined;
  cause?: unknown;
}

export type AiErrorCode =
  // told by this module
  | "INFERENCE_DISABLED" // also the service's, with status 503
  | "TOKEN_UNAVAILABLE"
  | "NETWORK_ERROR"
  | "STREAM_CUT"
  | "ANSWER_UNEXPECTED"
  // told by the service
  | "APP_NOT_FOUND"
  | "TOKEN_MISSING"
  | "TOKEN_INVALID"
  | "APP_BACKEND_UNREACHABLE"
  | "APP_RATE_LIMITED"
  | "USER_RATE_LIMITED"
  | "SPEND_CAP_REACHED"
  | "REQUEST_MALFORMED"
  | "REQUEST_TOO_LARGE"
  | "MODEL_NOT_ALLOWED"
  | "PROVIDER_UNREACHABLE"
  | "PROVIDER_ERROR"
  | "PROVIDER_TIMEOUT"
  | "PROVIDER_QUOTA_EXHAUSTED"
  | "BACKBONE_UNAVAILABLE"
  // codes to come
  | (string & {});
