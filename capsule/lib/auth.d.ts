/** Returns the signed-in user's JWT. */
export function getToken(): Promise<string>;

/** Sets the function that `getToken` calls: your backend's sign-in. The default calls the demo's `/session`. */
export function setTokenSource(source: () => string | PromiseLike<string>): void;
