// What each failure means to the person in front of the page: a heading, what to do, and whether asking the same
// again can help.

/** @typedef {{ heading: string, advice: string, again: boolean }} Words */

/** @type {Record<string, Words>} */
const WORDS = {
  INFERENCE_DISABLED: trouble("The model is switched off", "Managed inference is off right now."),
  TOKEN_UNAVAILABLE: trouble("You are not signed in", "The app’s backend gave no session. Is it running?", true),
  TOKEN_MISSING: trouble("You are not signed in", "The question went out without a session. Reload the page."),
  TOKEN_INVALID: trouble("Your session is not accepted", "It may have run out. Reload the page to sign in again."),
  APP_BACKEND_UNREACHABLE: trouble("Your session could not be checked", "The app’s backend does not answer.", true),
  USER_RATE_LIMITED: trouble("That was a lot of questions", "You have used this minute’s share.", true),
  APP_RATE_LIMITED: trouble("The app is busy", "All of its users together have used this minute’s share.", true),
  SPEND_CAP_REACHED: trouble("Today’s budget is used up", "It is filled again at midnight UTC."),
  REQUEST_TOO_LARGE: trouble("That question is too long", "At most 100 KB fit into one. Shorten it and ask again."),
  PROVIDER_UNREACHABLE: trouble("The model is out of reach", "The provider could not be connected to.", true),
  PROVIDER_ERROR: trouble("The model failed", "The provider could not finish the answer.", true),
  PROVIDER_TIMEOUT: trouble("The model took too long", "The provider did not answer in time.", true),
  PROVIDER_QUOTA_EXHAUSTED: trouble("The model is overbooked", "The provider takes no more questions now.", true),
  BACKBONE_UNAVAILABLE: trouble("The gateway is not ready", "It cannot reach its own store just now.", true),
  NETWORK_ERROR: trouble("No connection", "The gateway could not be reached, or refused this page’s address.", true),
  STREAM_CUT: trouble("The answer broke off", "What came is above, but it is not complete.", true),
};

/** @param {string} heading @param {string} advice @param {boolean} again @returns {Words} */
function trouble(heading, advice, again = false) {
  return { heading, advice, again };
}

/** @param {import("../lib/ai.js").AiError} error @returns {Words} */
export function words({ code, message }) {
  return WORDS[code] ?? trouble("That did not work", message || `The gateway said ${code}.`, true);
}
