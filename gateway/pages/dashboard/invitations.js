// The invitations of the person who is signed in: who invites them to which account, and the buttons to answer.

import { h } from "/pages/dom.js";
import { moment } from "/pages/format.js";
import { call } from "./api.js";
import { action, announce, refusal } from "./parts.js";
import { currentSession } from "./session.js";

const pathOf = ({ account }) => `/dashboard/session/invitations/${encodeURIComponent(account)}`;

// Returns a card with them, or null if there is none. After an answer, the dashboard begins again: with the account that
// was joined.
export function invitationCard() {
  const { invitations } = currentSession();
  if (!invitations.length) return null;
  const lead = "Nobody of an account sees anything of yours, and you see nothing of theirs, until you accept. Compare the id and who invites you: anybody can choose any name.";
  return h("section", { class: "card" }, h("h2", {}, "Invitations"), h("p", { class: "small quiet" }, lead), h("ul", { class: "invitations" }, invitations.map(item)));
}

function item(invitation) {
  const { account, name, by, role, endsAt } = invitation;
  const line = refusal();
  const answer = async (method, done) => {
    await call(method, pathOf(invitation));
    announce(done);
    dispatchEvent(new Event("account-changed"));
  };
  const accept = action("Accept", { class: "main", "aria-label": `Accept ${name} (${account})` }, line, () => answer("PUT", `You are now a member of ${name}.`));
  const decline = action("Decline", { "aria-label": `Decline ${name} (${account})` }, line, () => answer("DELETE", `Declined ${name}.`));
  return h(
    "li",
    {},
    h("h3", {}, name),
    h("p", { class: "small" }, `${by.includes("@") ? by : "An API key of the account"} invites you as ${role}. `, "Ends ", moment(endsAt), "."),
    h("p", { class: "small quiet" }, "Account ", h("code", {}, account)),
    h("div", { class: "row" }, accept, decline),
    line,
  );
}
