// Lets a person who belongs to several accounts choose one.

import { h } from "/pages/dom.js";
import { capital } from "/pages/format.js";
import { action, card, refusal } from "./parts.js";
import { chooseAccount } from "./session.js";

export function showAccounts(main, { email, accounts }, enter) {
  const line = refusal();
  const choose = ({ id, name, role }) => {
    const open = action(name, { class: "choice" }, line, async () => {
      await chooseAccount(id);
      await enter();
    });
    open.append(h("span", { class: "small quiet" }, `${capital(role)} · `, h("code", {}, id)));
    return h("li", {}, open);
  };
  main.replaceChildren(
    h(
      "div",
      { class: "log-in" },
      card(null, h("h1", { tabindex: "-1" }, "Choose an account"), h("p", { class: "quiet" }, `${email} belongs to several accounts.`), h("ul", { class: "choices" }, accounts.map(choose)), line),
    ),
  );
  main.querySelector("h1").focus();
}
