// The app's own sign-in. Put your backend's here: lib/ai.js needs nothing but getToken().
// This one asks the demo backend for a session; its token is short-lived and renewed before it runs out.

/** @type {{ token: string, renewAt: number } | undefined} */
let session;
/** @type {Promise<string> | undefined} */
let renewal;

/** The signed-in user's JWT. Callers at the same time share one renewal. */
export async function getToken() {
  if (session && Date.now() < session.renewAt) return session.token;
  renewal ??= renew().finally(() => (renewal = undefined));
  return renewal;
}

async function renew() {
  const response = await fetch("/session", { method: "POST" });
  if (!response.ok) throw new Error(`The sign-in failed: /session answered ${response.status}.`);
  /** @type {{ token: string }} */
  const { token } = await response.json();
  session = { token, renewAt: Date.now() + 0.8 * lifetime(token) };
  return token;
}

/**
 * In milliseconds. From the token's own two times, so that a wrong clock here does not matter.
 * @param {string} token
 */
function lifetime(token) {
  const payload = token.split(".")[1] ?? "";
  const { iat, exp } = JSON.parse(atob(payload.replaceAll("-", "+").replaceAll("_", "/")));
  return (exp - iat) * 1000;
}
