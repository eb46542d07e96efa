// Explains each failure to the user: a heading, what to do, and whether to offer a retry.

/** @typedef {{ heading: string, advice: string, retry: boolean }} Words */

/** @type {Record<string, Words>} */
const WORDS = {
  INFERENCE_DISABLED: words("The model is switched off", "This app cannot ask it right now."),
  TOKEN_UNAVAILABLE: words("You are not signed in", "The app could not get your session. Sign in, and ask again.", true),
  TOKEN_MISSING: words("You are not signed in", "The question was sent without a session. Sign in, and ask again."),
  TOKEN_INVALID: words("Your session was not accepted", "It may have expired. Sign out, sign in, and ask again."),
  APP_BACKEND_UNREACHABLE: words("Your session could not be checked", "The app’s backend did not respond.", true),
  TOKENS_LIMITED: words("Sign-ins are limited right now", "Too many invalid sessions of this app arrived.", true),
  USER_RATE_LIMITED: words("That was a lot of questions", "You have reached your limit for this minute.", true),
  APP_RATE_LIMITED: words("The app is busy", "All users of the app together have reached its limit for this minute.", true),
  SPEND_CAP_REACHED: words("Today’s budget is used up", "It resets at midnight UTC."),
  APP_CAP_REACHED: words("The app’s budget for today is used up", "It resets at midnight UTC."),
  USER_CAP_REACHED: words("Your budget for today is used up", "It resets at midnight UTC."),
  REQUEST_MALFORMED: words("The question could not be read", "Change it, and try again.", true),
  REQUEST_TOO_LARGE: words("That question is too long", "A question can be up to 100 KB. Shorten it, and try again."),
  MODEL_NOT_ALLOWED: words("This model is not available", "The app asks for a model that it may not use."),
  PROVIDER_REFUSED: words("The model does not accept that question", "Shorten or change it, and try again."),
  PROVIDER_UNREACHABLE: words("The model cannot be reached", "The service could not connect to it.", true),
  PROVIDER_ERROR: words("The model failed", "It could not finish the answer.", true),
  PROVIDER_TIMEOUT: words("The model took too long", "It did not answer in time.", true),
  PROVIDER_QUOTA_EXHAUSTED: words("The model is at capacity", "It takes no more questions right now.", true),
  BACKBONE_UNAVAILABLE: words("The service is not ready", "It cannot reach its database right now.", true),
  APP_NOT_FOUND: words("The service does not know this app", "It may have been renamed or deleted since this build."),
  APP_SUSPENDED: words("This app is suspended", "Its owner can ask the operator of the service for the reason."),
  ORIGIN_NOT_ALLOWED: words("This address may not ask the model", "Open the app at its own address."),
  NETWORK_ERROR: words("No connection", "The service could not be reached, or it does not accept this page’s address.", true),
  STREAM_CUT: words("The answer was cut off", "The text above is incomplete.", true),
  ANSWER_EMPTY: words("The model thought for too long", "It had no room left for an answer. Ask for less at once.", true),
  ANSWER_UNEXPECTED: words("That was not an answer", "Something between this page and the service replied instead.", true),
};

/** @param {string} heading @param {string} advice @param {boolean} retry @returns {Words} */
function words(heading, advice, retry = false) {
  return { heading, advice, retry };
}

/** @param {{ code: string, message: string }} error @returns {Words} */
export function explain({ code, message }) {
  return WORDS[code] ?? words("That did not work", message || `The service returned ${code}.`, true);
}
