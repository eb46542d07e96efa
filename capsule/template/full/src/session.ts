import { setTokenSource } from "capsule-ai/auth";

export interface User {
  id: string;
  name: string;
  email: string;
}

/** The backend refused a call. Its message is for the user. */
export class Refused extends Error {
  readonly status: number;
  readonly code: string | undefined;

  constructor(status: number, message: string, code?: string) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Calls the app's own backend. Rejects with Refused, or with the browser's error if there was no response. */
export async function call<T>(method: string, path: string, body?: unknown): Promise<T> {
  const response = await fetch(path, {
    method,
    ...(body !== undefined && { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
  });
  const text = await response.text();
  if (response.ok) return (text ? JSON.parse(text) : undefined) as T;
  const { message, error, code } = readFault(text);
  throw new Refused(response.status, message ?? error ?? `The app answered with HTTP ${response.status}.`, code);
}

function readFault(text: string): { message?: string; error?: string; code?: string } {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}

export async function currentUser(): Promise<User | undefined> {
  const session = await call<{ user: User } | null>("GET", "/api/auth/get-session");
  return session?.user;
}

export async function signIn(email: string, password: string): Promise<User> {
  return (await call<{ user: User }>("POST", "/api/auth/sign-in/email", { email, password })).user;
}

export async function signUp(name: string, email: string, password: string): Promise<User> {
  return (await call<{ user: User }>("POST", "/api/auth/sign-up/email", { name, email, password })).user;
}

export async function signOut(): Promise<void> {
  await call("POST", "/api/auth/sign-out", {});
}

let token: { value: string; renewAt: number } | undefined;

// lib/ai.js sends this token with each question. It is the same for some minutes.
setTokenSource(async () => {
  if (token && Date.now() < token.renewAt) return token.value;
  const { token: value } = await call<{ token: string }>("GET", "/api/auth/token");
  token = { value, renewAt: Date.now() + 0.8 * lifetime(value) };
  return value;
});

/** Returns a token's lifetime in milliseconds, from its own two times: the local clock may be wrong. */
function lifetime(jwt: string): number {
  const payload = jwt.split(".")[1] ?? "";
  const { iat, exp } = JSON.parse(atob(payload.replaceAll("-", "+").replaceAll("_", "/")));
  return (exp - iat) * 1000;
}
