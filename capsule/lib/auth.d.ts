/** The signed-in user's JWT. */
export function getToken(): Promise<string>;

/** Sets where `getToken` gets the token from: the sign-in of your backend. Without it, that is the demo's `/session`. */
export function setTokenSource(source: () => string | PromiseLike<string>): void;
