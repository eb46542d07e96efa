// Who is logged in, and what the session may do.

import { call, get } from "./api.js";

let session = { permitted: [], accounts: [], invitations: [] };

// Resolves with the session: { email, account, role, scope, permitted, accounts, invitations, operator }.
export async function readSession() {
  session = await get("/dashboard/session");
  return session;
}

export const currentSession = () => session;

// Returns whether the session may make the call of the account API.
export const may = (name) => session.permitted.includes(name);

// Makes the button to sign in the main one of a log-in form, if there is a provider. Returns it, or null.
export function preferSignIn(form) {
  const link = form.querySelector("a.button:not([hidden])");
  if (link) form.querySelector("button").classList.remove("main");
  return link;
}

export const chooseAccount = (account) => call("PUT", "/dashboard/session", { body: { account } });
