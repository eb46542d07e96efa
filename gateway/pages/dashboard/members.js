// The card with the account's members: people who sign in, with their roles, and those who are invited.

import { h } from "/pages/dom.js";
import { capital, moment } from "/pages/format.js";
import { call, get } from "./api.js";
import { follow } from "./follow.js";
import { action, announce, badge, card, confirmAction, empty, field, form, redraw, refusal, run, table } from "./parts.js";
import { currentSession, may } from "./session.js";

// What a member of each role may do.
const ROLES = { owner: "Everything", developer: "All but keys, members, limits and deletions", viewer: "Read" };

const pathOf = (email) => `/account/members/${encodeURIComponent(email)}`;

export async function memberCard(signal, changed) {
  const list = h("div", { class: "stack" });
  const refresh = async () => redraw(list, await get("/account/members", signal), (rows) => memberTable(rows, changeMember));
  const changeMember = async (method, email, body) => {
    const member = await call(method, pathOf(email), { body });
    await Promise.all([refresh(), changed()]);
    return member;
  };
  await follow(["members"], signal, refresh);
  return card("Members", may("set_member") && memberForm(changeMember), list);
}

const roles = (properties, chosen) =>
  h("select", properties, Object.keys(ROLES).map((value) => h("option", { value, selected: value === chosen }, capital(value))));

function memberForm(changeMember) {
  const email = h("input", { id: "member", type: "email", required: true, maxlength: "254", autocomplete: "off", placeholder: "ada@example.com" });
  const rule = h("p", { class: "small quiet" });
  const role = roles({ id: "role", onchange: () => explain() }, "developer");
  const explain = () =>
    (rule.textContent = `May do: ${ROLES[role.value].toLowerCase()}. They become a member by signing in with this address and accepting, within 14 days.`);
  explain();
  const add = async () => {
    const member = await changeMember("PUT", email.value.trim(), { role: role.value });
    announce(member.state === "invited" ? `Invited ${member.email}.` : `${member.email} is now ${member.role}.`);
    email.value = "";
  };
  const fields = [field("E-mail address", email), field("Role", role)];
  return [form("with-button two", fields, h("button", { class: "main" }, "Invite"), add), rule];
}

function memberTable(members, changeMember) {
  if (!members.length) return empty("No members yet", "The account is used with its API keys only.");
  const line = refusal();
  const change = ({ email, role, state }) => {
    const select = roles({ "aria-label": `Role of ${email}`, "data-focus": `role ${email}` }, role);
    select.addEventListener("change", async () => {
      const set = async () => {
        await changeMember("PUT", email, { role: select.value });
        announce(`${email} is ${state === "invited" ? "invited as" : "now"} ${select.value}.`);
        return true;
      };
      if (!(await run(line, set))) select.value = role;
    });
    return select;
  };
  const own = currentSession().email;
  const remove = ({ email, state }) => {
    if (email !== own && !may("remove_member")) return "";
    if (state === "invited") {
      const named = { class: "plain danger", "data-focus": email, "aria-label": `Cancel the invitation of ${email}` };
      return action("Cancel", named, line, async () => {
        await changeMember("DELETE", email);
        announce(`Canceled the invitation of ${email}.`);
      });
    }
    const [verb, question] = email === own ? ["Leave", "Leave this account?"] : ["Remove", `Remove ${email}?`];
    const named = { class: "plain danger", "data-focus": email, "aria-label": question.slice(0, -1) };
    return action(verb, named, line, async (button) => {
      const whose = email === own ? "Your" : "Their";
      const known = email === own ? "you" : "they";
      const loss = `${whose} sessions for this account end at once. API keys that ${known} know stay valid.`;
      if (!(await confirmAction(question, loss, verb))) return button.focus();
      await changeMember("DELETE", email);
      announce(`Removed ${email}.`);
    });
  };
  const columns = {
    Address: ({ email }) => [email, email === own && h("span", { class: "quiet" }, " (you)")],
    Role: may("set_member") ? change : ({ role }) => capital(role),
    Since: ({ since, state, endsAt }) => (state === "invited" ? [badge("Invited"), h("span", { class: "small quiet" }, " ends ", moment(endsAt))] : moment(since)),
    ...((own || may("remove_member")) && { "": remove }),
  };
  return [table("Members", columns, members), line];
}
