// The card with an app's custom domains: the records for their DNS, which are verified, and which one is the primary.

import { h } from "/pages/dom.js";
import { call, get } from "./api.js";
import { follow } from "./follow.js";
import { action, announce, badge, card, confirmAction, empty, field, form, redraw, refusal } from "./parts.js";
import { may } from "./session.js";
import { snippet } from "./snippets.js";

const MAX_DOMAINS = 5; // of an app

export async function domainCard(at, signal) {
  const list = h("div", { class: "stack" });
  const problems = {}; // by domain: what its last verification in this page found
  let domains = [];

  const show = (answer) => {
    domains = answer;
    adding.hidden = domains.length >= MAX_DOMAINS;
    redraw(list, [domains, problems], () => (domains.length ? domains.map(shown) : empty("No domain", "The app has no domain of its own.")));
  };
  const load = () => get(`${at}/domains`, signal);
  const refresh = async () => {
    const before = domains;
    const answer = await load();
    if (domains === before) show(answer); // otherwise they were changed here meanwhile, and the answer may be older
  };
  // Resolves with the domain, after all of them are shown as they are then.
  const change = async (method, name, path = "", body = undefined) => {
    const answer = await call(method, `${at}/domains/${encodeURIComponent(name)}${path}`, { body });
    if (answer) problems[answer.domain] = answer.verified ? "" : answer.problem;
    show(await load());
    return answer;
  };

  const input = h("input", {
    id: "domain",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    autocapitalize: "none",
    placeholder: "app.example.com",
  });
  const add = async () => {
    const { domain, verified } = await change("PUT", input.value.trim());
    input.value = "";
    announce(verified ? `${domain} is verified already.` : `Added ${domain}. It is not verified yet.`);
    focusState(domain);
  };
  const adding = h(
    "div",
    { class: "stack" },
    h("p", { class: "quiet" }, "Serve this app at up to five domains of your own. Visitors of the others are led to the primary one."),
    form("with-button", [field("Domain", input)], h("button", { class: "main" }, "Add domain"), add),
  );

  const shown = (domain) => {
    const { domain: name, primary, verified, records } = domain;
    const line = refusal();
    const named = (verb, kind) => ({ class: kind, "data-focus": `${verb} ${name}`, "aria-label": `${verb} ${name}` });
    const verify = !verified && may("prove_domain") && action("Verify", named("Verify", "main"), line, async () => {
      const answer = await change("POST", name, "/verify");
      announce(answer.verified ? `${name} is verified.` : answer.problem);
      if (answer.verified) focusState(name);
    });
    const prefer = !primary && may("put_domain") && action("Make primary", named("Make primary", ""), line, async () => {
      await change("PUT", name, "", { primary: true });
      announce(`${name} is the primary domain.`);
      focusState(name);
    });
    const remove = may("remove_domain") && action("Remove", named("Remove", "danger"), line, async (button) => {
      const loss = `The app is no longer served at ${name}.`;
      if (!(await confirmAction(`Remove ${name}?`, loss, "Remove"))) return button.focus();
      await change("DELETE", name);
      announce(`Removed ${name}.`);
      document.querySelector("#domain")?.focus(); // null if the user has left the view
    });
    const wrong = domain.problem || problems[name];
    const copies = records.flatMap(({ type, name: at, value }) => [
      snippet(`Name of the ${type} record`, at),
      snippet(`Value of the ${type} record`, value),
    ]);
    return h(
      "section",
      { class: "card", "aria-label": name },
      h("h3", { id: stateOf(name), class: "row", tabindex: "-1" }, name, primary && badge("Primary"), state(domain)),
      wrong && h("p", { class: "refusal" }, wrong),
      help(verified, copies),
      line,
      h("div", { class: "row" }, verify, prefer, remove),
    );
  };

  await follow(["apps"], signal, refresh);
  return card("Custom domains", may("put_domain") && adding, list);
}

const stateOf = (name) => `domain ${name}`;

const focusState = (name) => document.getElementById(stateOf(name))?.focus();

const state = ({ verified }) => (verified ? badge("Verified", "good") : badge("Not verified", "warn"));

function help(verified, records) {
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
