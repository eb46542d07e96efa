// Logs in: leads to the provider, or exchanges an API key for a cookie.

import { plural } from "/pages/format.js";
import { call } from "./api.js";
import { storeDraft } from "./drafts.js";
import { preferSignIn } from "./session.js";

export function showLogIn(main, why, enter) {
  main.replaceChildren(document.querySelector("#log-in").content.cloneNode(true));
  const form = main.querySelector("form");
  const [key, button, refusal] = ["#key", "button", "#refusal"].map((name) => form.querySelector(name));
  const signIn = preferSignIn(form);
  signIn?.addEventListener("click", storeDraft);
  const lead = form.querySelector("#why");
  lead.textContent = why || (signIn ? "" : "Use your account’s API key.");
  lead.hidden = !lead.textContent;

  const refuse = (text) => {
    refusal.textContent = text;
    key.setAttribute("aria-invalid", "true");
    key.focus();
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    const apiKey = key.value.trim();
    if (!apiKey) return refuse("Paste your API key. It begins with csk_.");
    button.disabled = true;
    refusal.textContent = "";
    key.removeAttribute("aria-invalid");
    try {
      await call("POST", "/dashboard/session", { body: { apiKey } });
    } catch (error) {
      button.disabled = false;
      return refuse(explain(error));
    }
    await enter();
  });
  (signIn ?? key).focus();
}

function explain(error) {
  switch (error.status) {
    case 0:
      return "The service cannot be reached. Check your connection and try again.";
    case 401:
      return "This key is not valid. Check that you copied all of it.";
    case 429:
      return `Too many failed logins from your address. Try again in ${plural(error.retryAfter ?? 60, "second")}.`;
    default:
      return error.message || "The service did not respond. Try again.";
  }
}
