// Explains each failure to the user: a heading, what to do, and whether to offer a retry.

/** @typedef {{ heading: string, advice: string, retry: boolean }} Words */

/** @type {Record<string, Words>} */
const WORDS = {
  INFERENCE_DISABLED: words("The model is switched off", "Managed inference is off right now."),
  TOKEN_UNAVAILABLE: words("You are not signed in", "The app’s backend did not return a session. Is it running?", true),
  TOKEN_MISSING: words("You are not signed in", "The question was sent without a session. Reload the page."),
  TOKEN_INVALID: words("Your session was not accepted", "It may have expired. Reload the page to sign in again."),
  APP_BACKEND_UNREACHABLE: words("Your session could not be checked", "The app’s backend did not respond.", true),
  TOKENS_LIMITED: words("Sign-ins are limited right now", "Too many invalid sessions of this app arrived.", true),
  USER_RATE_LIMITED: words("That was a lot of questions", "You have reached your limit for this minute.", true),
  APP_RATE_LIMITED: words("The app is busy", "All users of the app together have reached its limit for this minute.", true),
  SPEND_CAP_REACHED: words("Today’s budget is used up", "It resets at midnight UTC."),
  APP_CAP_REACHED: words("The app’s budget for today is used up", "It resets at midnight UTC."),
  USER_CAP_REACHED: words("Your budget for today is used up", "It resets at midnight UTC."),
  REQUEST_TOO_LARGE: words("That question is too long", "A question can be up to 100 KB. Shorten it and try again."),
  PROVIDER_REFUSED: words("The model does not accept that question", "Shorten or change it, and try again."),
  PROVIDER_UNREACHABLE: words("The model cannot be reached", "The gateway could not connect to the provider.", true),
  PROVIDER_ERROR: words("The model failed", "The provider could not finish the answer.", true),
  PROVIDER_TIMEOUT: words("The model took too long", "The provider did not answer in time.", true),
  PROVIDER_QUOTA_EXHAUSTED: words("The model is at capacity", "The provider takes no more questions right now.", true),
  BACKBONE_UNAVAILABLE: words("The gateway is not ready", "It cannot reach its database right now.", true),
  NETWORK_ERROR: words("No connection", "The gateway could not be reached, or it does not accept this page’s address.", true),
  STREAM_CUT: words("The answer was cut off", "The text above is incomplete.", true),
};

/** @param {string} heading @param {string} advice @param {boolean} retry @returns {Words} */
function words(heading, advice, retry = false) {
  return { heading, advice, retry };
}

/** @param {import("../lib/ai.js").AiError} error @returns {Words} */
export function explain({ code, message }) {
  return WORDS[code] ?? words("That did not work", message || `The gateway returned ${code}.`, true);
}
