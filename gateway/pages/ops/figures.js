// Draws a snapshot into those of the page's cards whose data has changed. It keeps the elements of buttons.

import { h } from "/pages/dom.js";
import { count, duration, money, plural, roughly, since } from "/pages/format.js";
import { key, share } from "/pages/chart.js";
import { kindOf } from "/pages/outcomes.js";
import { badge, facts, note, redraw, table } from "/dashboard/parts.js";
import { minuteChart, total } from "./minutes.js";

const STATUS = {
  operational: ["Operational", "good"],
  disabled: ["Off", "bad"],
  misconfigured: ["Misconfigured", "bad"],
  "quota-exhausted": ["Provider quota exhausted", "warn"],
  "provider-unreachable": ["Provider unreachable", "bad"],
};
const OLD = 60_000; // ms after which a waiting entry needs attention
const LATE = 10_000; // ms since the last heartbeat; workers send one every five seconds

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const put = (id, data, draw) => redraw(document.getElementById(id), data, draw);
const goTo = (href, text) => h("a", { href, "data-focus": href }, text);
const there = (id) => document.getElementById(id) !== null;

// Draws the cards of the view that is open; other views have none.
export function draw(snapshot) {
  if (there("glance")) overview(snapshot);
  if (there("gateways")) system(snapshot);
}

function overview(snapshot) {
  glance(snapshot);
  inference(snapshot.inference);
  provider(snapshot.provider);
  providers(snapshot.providers);
  attention(snapshot);
  if (there("requests")) requests(snapshot.minutes); // other periods have figures of their own
  models(snapshot.models);
  spend(snapshot.spend);
}

function system(snapshot) {
  redis(snapshot.redis);
  queue("webhooks", snapshot.webhooks, "event", snapshot.outcomes);
  queue("deploys", snapshot.deploys, "deploy");
  pods(snapshot.pods);
  deadLetters(snapshot.deadLetters);
  storage(snapshot.storage);
  workers(snapshot);
  gateways(snapshot.gateways);
}

const tile = (name, value, unit) =>
  h("div", {}, h("h2", { class: "small quiet" }, name), h("p", { class: "figure" }, value, unit && h("small", {}, ` ${unit}`)));

function glance({ gateways, minutes, firstToken, spend }) {
  const streams = gateways.reduce((sum, gateway) => sum + gateway.streams, 0);
  const sums = total(minutes);
  const requests = minutes.reduce((sum, minute) => sum + minute.requests, 0);
  put("glance", [streams, requests, sums, firstToken, spend.total], () => [
    tile("Open streams", count(streams)),
    tile("Requests, last hour", roughly(requests), refusedWords(sums)),
    tile("Answered", answeredShare(sums), "excluding refused requests"),
    tile("First token, p50", duration(firstToken.p50), firstToken.p99 === null ? "" : `p99 ${duration(firstToken.p99)}`),
    tile("Spending today", money(spend.total)),
  ]);
}

// Returns the share of answered requests. It excludes requests that the service had to refuse, and abandoned ones.
function answeredShare({ answered, failed, off }) {
  const due = answered + failed + off;
  return due ? percent(answered / due) : "–";
}

function refusedWords({ faulty, limited }) {
  const words = [faulty && `${roughly(faulty)} invalid`, limited && `${roughly(limited)} over a limit`].filter(Boolean);
  return words.length ? `refused: ${words.join(", ")}` : "";
}

function inference({ managedInferenceStatus, enabled, approved, emergencyOff }) {
  const [name, tone] = STATUS[managedInferenceStatus];
  const badge = document.getElementById("inference");
  if (badge.textContent !== name) document.getElementById("status").textContent = `Inference: ${name}`;
  badge.textContent = name;
  badge.className = `badge ${tone}`;
  const closed = [
    !enabled && "the switch is off",
    !approved && "processing is not approved",
    emergencyOff && "the emergency-off file exists",
  ].filter(Boolean);
  put("inference-why", closed, () =>
    closed.length
      ? `Requests are refused: ${closed.join(", ")}.`
      : "Switch on, processing approved, no emergency-off file.",
  );
  label("switch", enabled, "Turn off", "Turn on");
  label("approval", approved, "Withdraw approval", "Approve processing");
}

function label(id, open, close, reopen) {
  const button = document.getElementById(id);
  button.textContent = open ? close : reopen;
  button.dataset.open = open;
}

function provider(figures) {
  put("provider", figures, ({ limit, used, waiting, top }) => [
    facts({
      "Requests at the provider": limit ? `${count(used)} of ${count(limit)}` : `${count(used)}, no limit`,
      "Waiting for a permit": count(waiting),
    }),
    limit > 0 && share(limit, { used }, `${used} of ${limit} requests at the provider`),
    top.length > 0 &&
      facts(Object.fromEntries(top.map(({ account, name, waiting }) => [name || account, plural(waiting, "request")]))),
  ]);
}

// A single provider has its figures above, and its switch is that of inference.
function providers(rows) {
  const columns = {
    Provider: ({ name, region }) => [name, note(region)],
    Status: ({ enabled, status, passedOverUntil }) => [enabled ? badge(...STATUS[status]) : badge("Disabled"), passedOverUntil && pause(passedOverUntil)],
    "In progress": ({ permits }) => (permits.limit ? `${count(permits.used)} of ${count(permits.limit)}` : count(permits.used)),
    Waiting: ({ permits }) => count(permits.waiting),
    "Attempts today": ({ attempts }) => count(attempts),
    "Failovers today": ({ failovers }) => (failovers ? badge(count(failovers), "warn") : "–"),
    "": ({ name, enabled }) =>
      h("button", { type: "button", "data-provider": name, "data-focus": `provider-${name}`, "data-open": `${enabled}` }, enabled ? "Disable" : "Enable"),
  };
  put("providers", rows, () => rows.length > 1 && table("Providers", columns, rows));
}

// A provider that answered 429 or 503 with a Retry-After gets no requests until then.
function pause(until) {
  const time = h("time", { datetime: until }, clock.format(Date.parse(until)));
  return h("div", { class: "small quiet" }, "Passed over until ", time);
}

function attention({ inference: { managedInferenceStatus }, needsAttention, deadLetters, workers, webhooks, deploys }) {
  const dead = workers.filter(({ heartbeatMs }) => heartbeatMs === null).length;
  const late = [webhooks, deploys].filter(({ oldestMs }) => oldestMs > OLD).length;
  const found = [
    managedInferenceStatus !== "operational" && ["#/", `Inference: ${STATUS[managedInferenceStatus][0]}`, "bad"],
    needsAttention.unhealthyApps && ["#/apps?health=unhealthy", `${plural(needsAttention.unhealthyApps, "app")} unhealthy`, "bad"],
    needsAttention.failedDeploys && ["#/deploys", `${plural(needsAttention.failedDeploys, "deploy")} failed in 24 hours`, "warn"],
    deadLetters.count && ["#/system", plural(deadLetters.count, "dead letter"), "bad"],
    dead && ["#/system", `${plural(dead, "worker")} died with unfinished work`, "bad"],
    needsAttention.missingWorkers.length &&
      ["#/system", `No worker running: ${needsAttention.missingWorkers.join(", ")}`, "bad"],
    late && ["#/system", `${plural(late, "queue")} with old entries`, "bad"],
  ].filter(Boolean);
  const item = ([href, text, tone]) => h("li", {}, badge(goTo(href, text), tone));
  put("attention", found, () => (found.length ? h("ul", { class: "attention" }, found.map(item)) : badge("Nothing", "good")));
}

function models(figures) {
  const columns = {
    Model: ({ model }) => model,
    Requests: ({ requests }) => count(requests),
    "Failed at the provider": ({ requests, errors }) => (errors ? badge(`${count(errors)}, ${percent(errors / requests)}`, "bad") : "–"),
    "First token, p50": ({ firstToken }) => duration(firstToken.p50),
    "First token, p99": ({ firstToken }) => duration(firstToken.p99),
  };
  const none = h("p", { class: "empty" }, "No requests in the last hour.");
  put("models", figures, () => (figures.length ? table("Models, last hour", columns, figures) : none));
}

function redis(figures) {
  put("redis", figures, ({ latencyMs, memory, memoryLimit, clients, commandsPerSecond }) => {
    const used = bytes(memory);
    return [
      facts({
        "Round trip": `${latencyMs.toFixed(2)} ms`,
        "Commands per second": count(commandsPerSecond),
        Clients: count(clients),
        Memory: memoryLimit ? `${used} of ${bytes(memoryLimit)}` : `${used}, no limit`,
      }),
      memoryLimit > 0 && share(memoryLimit, { memory }, `${used} of ${bytes(memoryLimit)} of memory used`),
    ];
  });
}

const bytes = (number) =>
  number < 2 ** 30 ? `${(number / 2 ** 20).toFixed(1)} MiB` : `${(number / 2 ** 30).toFixed(1)} GiB`;

function requests(minutes) {
  const codes = {};
  for (const minute of minutes) {
    for (const [code, often] of Object.entries(minute.codes)) codes[code] = (codes[code] ?? 0) + often;
  }
  const sorted = Object.entries(codes).sort(([, a], [, b]) => b - a);
  put("requests", minutes, () => [
    minuteChart(minutes),
    sorted.length > 0 && h("ul", { class: "codes" }, sorted.map(([code, often]) =>
      h("li", {}, h("i", { class: kindOf(code) }), h("code", {}, code), h("b", {}, count(often))))),
  ]);
}

function spend(figures) {
  const columns = {
    Account: ({ account, name }) => [goTo(`#/accounts/${account}`, name), note(account)],
    Plan: ({ plan }) => plan,
    Settled: ({ settled }) => money(settled),
    Reserved: ({ reserved }) => money(reserved),
    "Share of cap": ({ settled, reserved, cap }) => [
      share(cap, { settled, reserved }, `${money(settled + reserved)} of ${money(cap)}`),
      note(`${percent((settled + reserved) / cap)} of ${money(cap)}`),
    ],
  };
  put("spend-day", figures.day, (day) => `${day}, UTC`);
  put("spend", figures, ({ total, top }) => [
    h("p", { class: "figure" }, money(total)),
    top.length
      ? table("Spending today", columns, top, "stacked spenders")
      : h("p", { class: "empty" }, "No account has spent anything today."),
  ]);
}

function queue(id, figures, one, ended) {
  put(id, [figures, ended], ([{ waiting, pending, oldestMs }]) => [
    facts({
      Waiting: badge(plural(waiting, one), waiting ? "busy" : "good"),
      "Longest wait": oldestMs === null ? "–" : badge(duration(oldestMs), oldestMs > OLD ? "bad" : "good"),
      "In progress": count(pending),
    }),
    ended && outcomes(ended),
  ]);
}

function outcomes(counts) {
  const reasons = Object.entries(counts).filter(([name]) => name.includes(":")).map(([name, often]) => [name.split(":")[1], often]);
  return [
    h("p", { class: "small quiet" }, "Outcomes of all deliveries so far"),
    key([
      ["delivered", "delivered", roughly(counts.delivered ?? 0)],
      ["failed", "failed", roughly(counts.failed ?? 0)],
      ["dropped", "dropped", roughly(counts.dropped ?? 0)],
    ]),
    reasons.length > 0 && h("p", { class: "small quiet" }, "Failures by reason: ", byReason(reasons), "."),
  ];
}

function deadLetters(letters) {
  document.getElementById("dead-letters-card").hidden = !letters.count;
  const columns = {
    "Removed at": ({ at }) => at.slice(0, 19).replace("T", " "),
    Stream: ({ stream, entry }) => [stream, note(entry)],
    Reason: ({ reason }) => reason,
    Fields: ({ fields }) => h("code", { class: "small" }, Object.entries(fields).map(([name, value]) => `${name}=${value}`).join(" ")),
  };
  put("dead-letters", letters, ({ count: all, newest }) => [
    h("p", { class: "small quiet" }, `${plural(all, "entry", "entries")} of the last 30 days that no worker could process. The worker’s log has details.`),
    table("Dead letters", columns, newest),
  ]);
}

function storage(figures) {
  put("storage", figures, ({ limit, top }) => {
    const columns = {
      Account: ({ account, name }) => [goTo(`#/accounts/${account}`, name), note(account)],
      Stored: ({ bytes: used }) => [share(limit, { memory: used }, `${bytes(used)} of ${bytes(limit)}`), note(bytes(used))],
    };
    return [
      h("p", { class: "small quiet" }, `Delivery logs and event data, up to ${bytes(limit)} per account`),
      top.length
        ? table("Storage by account", columns, top, "stacked storage")
        : h("p", { class: "empty" }, "No account stores any data yet."),
    ];
  });
}

// Apps that run on machines have no pods. `at` changes with each report, and is not shown.
function pods(report) {
  document.getElementById("pods-card").hidden = !report;
  if (!report) return;
  const { at, ...figures } = report;
  put("pods", [at !== null, figures], ([reported, { total, states, failures, nodes, waiting }]) => {
    if (!reported) {
      return h("p", { class: "empty" }, h("strong", {}, "No worker reports the pods"), h("span", {}, "Apps are served meanwhile. Start a worker ", h("code", {}, "sites"), ". If one is running, its log says why it does not report."));
    }
    if (!total) return h("p", { class: "empty" }, "The cluster runs no pods of apps.");
    const number = (of, tone) => (of ? badge(count(of), tone) : "0");
    return [
      facts({
        All: count(total),
        Running: number(states.running, "good"),
        Starting: number(states.starting, "busy"),
        "Waiting for their release": number(states.waitingForRelease, "busy"),
        "Waiting for room": number(states.waitingForRoom, "bad"),
        Failing: number(states.failing, "bad"),
        Stopping: count(states.stopping),
        ...(states.ended && { "Evicted or shut down": count(states.ended) }),
      }),
      states.failing > 0 && h("p", { class: "small quiet" }, "Failures by reason: ", byReason(Object.entries(failures)), "."),
      waiting.length > 0 ? waitingPods(waiting, states.waitingForRoom) : h("p", { class: "small quiet" }, "No pod waits for room."),
      nodes.length > 0 && [
        h("p", { class: "small quiet" }, "The apps’ pods on each node, and their memory"),
        table("Nodes", NODES, nodes),
      ],
    ];
  });
}

const NODES = {
  Node: ({ node }) => node,
  Pods: ({ pods }) => count(pods),
  Requested: ({ memoryRequested }) => bytes(memoryRequested),
  Limit: ({ memoryLimit }) => bytes(memoryLimit),
};

function waitingPods(waiting, all) {
  const listed = waiting.length < all ? ` These ${waiting.length} have waited longest.` : "";
  const columns = {
    "Waits for room": ({ app }) => goTo(`#/apps/${app}`, app),
    Deploy: ({ deploy }) => deploy,
    Waiting: ({ since: from }) => since(from),
    Reason: ({ reason }) => h("span", { class: "small" }, reason || "–"),
  };
  return [
    h("p", {}, `No node has room for ${plural(all, "pod")}. Add nodes, or stop apps.${listed}`),
    table("Pods that wait for room", columns, waiting, "stacked waiting"),
  ];
}

const byReason = (counts) =>
  counts.sort(([, a], [, b]) => b - a).map(([reason, often]) => `${reason} ${roughly(often)}`).join(", ");

function workers({ workers }) {
  const columns = {
    Worker: ({ group, name }) => [group, note(name)],
    Heartbeat: ({ heartbeatMs }) =>
      heartbeatMs === null ? badge("died", "bad") : badge(`${duration(Math.max(heartbeatMs, 0))} ago`, heartbeatMs > LATE ? "warn" : "good"),
    "In progress": ({ pending }) => count(pending),
  };
  const none = h("p", { class: "empty" }, h("strong", {}, "No worker is running"), " Events and deploys wait until you start one.");
  put("workers", workers, () => (workers.length ? table("Workers", columns, workers) : none));
}

function gateways(processes) {
  const rows = processes.map(({ id, startedAt, streams }) => ({ id, uptime: formatUptime(Date.now() - Date.parse(startedAt)), streams }));
  const columns = { Process: ({ id }) => id, Uptime: ({ uptime }) => uptime, Streams: ({ streams }) => count(streams) };
  put("gateways", rows, () => table("Gateways", columns, rows));
}

function formatUptime(milliseconds) {
  const minutes = Math.max(0, Math.round(milliseconds / 60_000));
  if (minutes < 60) return minutes ? `${minutes} min` : "under a minute";
  return minutes < 2880 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} days`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "under 0.1%";
  return `${(share * 100).toFixed(share === 0 || share === 1 ? 0 : 1)}%`;
}
