// The app's sign-in. Replace it with your backend's; lib/ai.js needs only getToken().
// This version gets a token from the demo backend and renews it before it expires. An app that installed the package
// calls setTokenSource() instead.

/** @type {Parameters<typeof import("./auth.d.ts").setTokenSource>[0]} */
let source = demoToken;

/** @type {typeof import("./auth.d.ts").setTokenSource} */
export function setTokenSource(tokenSource) {
  source = tokenSource;
}

/** @type {typeof import("./auth.d.ts").getToken} */
export async function getToken() {
  return source();
}

/** @type {{ token: string, renewAt: number } | undefined} */
let session;
/** @type {Promise<string> | undefined} */
let renewal;

/** Concurrent calls share one renewal. */
async function demoToken() {
  if (session && Date.now() < session.renewAt) return session.token;
  renewal ??= renew().finally(() => (renewal = undefined));
  return renewal;
}

async function renew() {
  const response = await fetch("/session", { method: "POST" });
  if (!response.ok) throw new Error(`The sign-in failed: /session returned ${response.status}.`);
  /** @type {{ token: string }} */
  const { token } = await response.json();
  session = { token, renewAt: Date.now() + 0.8 * lifetime(token) };
  return token;
}

/**
 * Returns the token's lifetime in milliseconds, from its own two times, so that a wrong local clock does not matter.
 * @param {string} token
 */
function lifetime(token) {
  const payload = token.split(".")[1] ?? "";
  const { iat, exp } = JSON.parse(atob(payload.replaceAll("-", "+").replaceAll("_", "/")));
  return (exp - iat) * 1000;
}
