import { find } from "./dom.ts";
import { Refused, signIn, signUp, type User } from "./session.ts";

const FAULTS: Record<string, string> = {
  INVALID_EMAIL_OR_PASSWORD: "The e-mail or the password is not right.",
  USER_ALREADY_EXISTS_USE_ANOTHER_EMAIL: "There is an account with this e-mail. Sign in instead.",
};

/** Lets a person sign in or create an account, and passes the user on. */
export function startSignIn(enter: (user: User) => Promise<void>): void {
  const form = find("#sign-in", HTMLFormElement);
  const title = find("h2", HTMLElement, form);
  const nameField = find("#name-field", HTMLElement, form);
  const [name, email, password] = ["name", "email", "password"].map((field) =>
    find(`[name=${field}]`, HTMLInputElement, form),
  ) as [HTMLInputElement, HTMLInputElement, HTMLInputElement];
  const fault = find(".fault", HTMLElement, form);
  const submit = find("[type=submit]", HTMLButtonElement, form);
  const other = find("#other", HTMLButtonElement, form);
  let isNew = false;

  function choose(creates: boolean): void {
    isNew = creates;
    title.textContent = submit.textContent = isNew ? "Create account" : "Sign in";
    nameField.hidden = name.disabled = !isNew;
    password.autocomplete = isNew ? "new-password" : "current-password";
    find(".other span", HTMLElement, form).textContent = isNew ? "Been here before?" : "New here?";
    other.textContent = isNew ? "Sign in" : "Create an account";
    fault.textContent = "";
    (isNew ? name : email).focus();
  }

  other.addEventListener("click", () => choose(!isNew));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    fault.textContent = "";
    submit.disabled = true;
    try {
      const user = isNew
        ? await signUp(name.value.trim(), email.value, password.value)
        : await signIn(email.value, password.value);
      await enter(user);
      find("#notes-title", HTMLElement).focus();
    } catch (error) {
      fault.textContent = explain(error);
    } finally {
      submit.disabled = false;
    }
  });
}

function explain(error: unknown): string {
  if (!(error instanceof Refused)) return "The app does not answer. Check your connection, and try again.";
  if (error.status === 429) return "Too many tries. Wait ten seconds, and try again.";
  return FAULTS[error.code ?? ""] ?? error.message;
}
