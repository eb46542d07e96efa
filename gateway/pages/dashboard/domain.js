// The card with an app's custom domain: the records for its DNS, and whether it is verified.

import { h } from "/pages/dom.js";
import { call, get } from "./api.js";
import { follow } from "./follow.js";
import { action, announce, badge, card, confirmAction, empty, field, form, redraw, refusal } from "./parts.js";
import { may } from "./session.js";
import { snippet } from "./snippets.js";

export async function domainCard(at, signal) {
  const body = h("div", { class: "stack" });
  let [domain, problem] = [null, ""]; // the problem that the last verification in this page found

  const draw = () => redraw(body, [domain, problem], () => (domain ? shown() : setting()));
  const show = (answer, found = "") => {
    [domain, problem] = [answer, found];
    draw();
  };
  const refresh = async () => {
    const before = domain;
    const { customDomain } = await get(at, signal);
    const answer = customDomain ? await get(`${at}/domain`, signal).catch(gone) : null;
    if (domain !== before) return; // it was changed here meanwhile, and the answer may be older
    const same = answer && domain && answer.domain === domain.domain && answer.verified === domain.verified;
    show(answer, same ? problem : "");
  };

  const setting = () => {
    const input = h("input", {
      id: "domain",
      required: true,
      autocomplete: "off",
      spellcheck: "false",
      autocapitalize: "none",
      placeholder: "app.example.com",
    });
    const set = async () => {
      show(await call("PUT", `${at}/domain`, { body: { domain: input.value.trim() } }));
      announce(`Set ${domain.domain}. It is not verified yet.`);
      focusState();
    };
    const button = h("button", { class: "main" }, "Add domain");
    if (!may("set_domain")) return empty("No domain", "The app has no domain of its own.");
    return [
      h("p", { class: "quiet" }, "Serve this app at a domain of your own."),
      form("with-button", [field("Domain", input)], button, set),
    ];
  };

  const shown = () => {
    const line = refusal();
    const verify = may("verify_domain") && action("Verify", { class: "main", "data-focus": "verify" }, line, async () => {
      const answer = await call("POST", `${at}/domain/verify`);
      show(answer, answer.problem);
      announce(answer.verified ? `${answer.domain} is verified.` : answer.problem);
      if (answer.verified) focusState();
    });
    const remove = may("clear_domain") && action("Remove", { class: "danger", "data-focus": "remove" }, line, async (button) => {
      const loss = `The app is no longer served at ${domain.domain}.`;
      if (!(await confirmAction(`Remove ${domain.domain}?`, loss, "Remove"))) return button.focus();
      await call("DELETE", `${at}/domain`);
      announce("Removed the domain.");
      show(null);
      document.querySelector("#domain")?.focus(); // null if the user has left the view
    });
    const wrong = domain.problem ?? problem;
    const records = domain.records.map(({ type, name, value }) => [
      snippet(`Name of the ${type} record`, name),
      snippet(`Value of the ${type} record`, value),
    ]);
    return [
      state(domain),
      wrong && h("p", { class: "refusal" }, wrong),
      help(domain, records),
      line,
      h("div", { class: "row" }, !domain.verified && verify, remove),
    ];
  };

  await follow(["apps"], signal, refresh);
  return card("Custom domain", body);
}

// The domain was removed elsewhere since the app's record was read.
function gone(error) {
  if (error.status === 404) return null;
  throw error;
}

const focusState = () => document.querySelector("#domain-state")?.focus();

function state({ domain, verified }) {
  const tone = verified ? badge("Verified", "good") : badge("Not verified", "warn");
  return h("p", { id: "domain-state", class: "row", tabindex: "-1" }, domain, tone);
}

function help({ verified }, records) {
  if (verified) return h("details", {}, h("summary", { class: "small" }, "Records in its DNS"), records);
  return [
    h(
      "p",
      { class: "quiet" },
      "Create these records in the domain’s DNS, then verify it. New records can take an hour to be visible. " +
        "Until the domain is verified, the app is not served there.",
    ),
    records,
  ];
}
