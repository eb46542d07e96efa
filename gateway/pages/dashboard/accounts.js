// For a person whose session has no account: lets them choose one of several, or answer an invitation.

import { h } from "/pages/dom.js";
import { capital } from "/pages/format.js";
import { invitationCard } from "./invitations.js";
import { action, card, refusal } from "./parts.js";
import { chooseAccount } from "./session.js";

export function showAccounts(main, { email, accounts, invitations }, enter) {
  const line = refusal();
  const choose = ({ id, name, role, owner }) => {
    const open = action(name, { class: "choice" }, line, async () => {
      await chooseAccount(id);
      await enter();
    });
    const first = owner ? `First owner: ${owner}` : "Has no owner but its API keys";
    open.append(h("span", { class: "small quiet" }, `${capital(role)} · `, h("code", {}, id)), h("span", { class: "small quiet" }, first));
    return h("li", {}, open);
  };
  const logOut = h("button", { type: "button", class: "plain", onclick: () => document.querySelector("#log-out").click() }, "Log out");
  const [title, text] = explain(email, accounts, invitations);
  main.replaceChildren(
    h(
      "div",
      { class: "log-in" },
      card(null, h("h1", { tabindex: "-1" }, title), h("p", { class: "quiet" }, text), accounts.length > 0 && h("ul", { class: "choices" }, accounts.map(choose)), line),
      invitationCard(),
      h("div", { class: "row" }, logOut),
    ),
  );
  main.querySelector("h1").focus();
}

function explain(email, accounts, invitations) {
  if (accounts.length) return ["Choose an account", `${email} belongs to ${accounts.length > 1 ? "several accounts" : "one account"}.`];
  if (invitations.length) return ["You are invited", `${email} belongs to no account yet. Accept an invitation to begin.`];
  return ["No account", `${email} belongs to no account. Ask for an invitation, or sign in again to create an account.`];
}
