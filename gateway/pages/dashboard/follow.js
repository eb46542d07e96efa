// Keeps views up to date. The account's stream of changes names what changed; while it is away, views poll.

import { h, pause, untilVisible } from "/pages/dom.js";
import { stream } from "./api.js";
import { sessionEnded } from "./parts.js";

const PACE = 1_000; // ms between two refreshes of a view, at least
const SHARE = 4; // after a refresh, a view rests this many times as long as it took
const SLOW = 30_000; // ms between two refreshes while the stream is away
const READY = "ready"; // the first event of the stream
const RETRY = 2_000; // ms until the stream is opened again; doubles up to SLOW while it cannot be opened

const followers = new Set(); // { topics, changed, wake }; `changed` has the topics that changed since the last refresh
let reading = null; // aborts the stream
let isOpen = false;

// Calls `work` at once, and again whenever one of the topics has changed. `work` gets the set of topics that may have
// changed: at first, all. Settles with the first call. The API's documentation lists the topics.
export async function follow(topics, signal, work) {
  const follower = { topics, changed: new Set(), wake() {} };
  let rest = PACE;
  const refresh = async () => {
    const began = performance.now();
    const changed = follower.changed.size ? follower.changed : new Set(topics);
    follower.changed = new Set();
    try {
      await work(changed);
    } catch (error) {
      follower.changed = new Set(topics);
      throw error;
    }
    rest = Math.min(Math.max(PACE, SHARE * (performance.now() - began)), SLOW);
  };
  const leave = () => {
    followers.delete(follower);
    setTimeout(stopUnused, PACE); // the next view may follow at once
  };
  followers.add(follower); // first, so that a change during the first call causes another one
  read();
  try {
    await refresh();
  } catch (error) {
    leave();
    throw error;
  }
  repeat(signal, refresh, (failures) => untilChanged(follower, signal, rest, failures)).finally(leave);
}

// Calls `work` at intervals, until it returns "done". For what no topic reports. Work that takes long calls the function
// that it gets when the service has answered.
export const poll = (milliseconds, signal, work) =>
  repeat(signal, work, (failures) => pause(Math.min(milliseconds * 2 ** failures, SLOW), signal));

// Works while the page is visible. A line above the view reports failures.
async function repeat(signal, work, wait) {
  const late = h("p", { class: "late", role: "status" }, "Out of date: the service does not respond. Trying again …");
  let failures = 0;
  const answered = () => {
    failures = 0;
    late.remove();
  };
  try {
    for (;;) {
      await wait(failures);
      await untilVisible(signal);
      try {
        if ((await work(answered)) === "done") return;
        answered();
      } catch (error) {
        if (signal.aborted || error.status === undefined) throw error;
        if (error.status === 401) return sessionEnded();
        if (error.code === "ACCOUNT_NOT_CHOSEN") return dispatchEvent(new Event("account-changed"));
        failures = Math.min(failures + 1, 5);
        document.querySelector("main > .view")?.prepend(late);
      }
    }
  } catch (error) {
    if (!signal.aborted) reportError(error);
  } finally {
    late.remove();
  }
}

// Resolves after the next change. After a failure, and while the stream is away, it resolves after a while anyway.
async function untilChanged(follower, signal, rest, failures) {
  await pause(Math.min(rest * 2 ** failures, SLOW), signal);
  if (!failures && !follower.changed.size) {
    await new Promise((resolve, reject) => {
      follower.wake = resolve;
      if (!isOpen) setTimeout(resolve, SLOW);
      signal.addEventListener("abort", () => reject(signal.reason), { once: true });
    });
  }
}

// -- the stream -------------------------------------------------------------------------------------------------

async function read() {
  if (reading || document.hidden) return;
  reading = new AbortController();
  const { signal } = reading;
  let retry = RETRY;
  const take = (topics) => {
    topics.forEach(note);
    isOpen = true;
    retry = RETRY;
  };
  try {
    for (;;) {
      await stream("/account/changes", signal, take).catch(() => {}); // refreshes of the views report the failure
      signal.throwIfAborted();
      lose();
      await pause(retry * (1 + Math.random()), signal); // not all pages at once
      retry = Math.min(retry * 2, SLOW);
    }
  } catch {
    // The page is hidden, or no view follows changes.
  }
}

// After "ready", anything may have changed before.
function note(topic) {
  for (const follower of followers) {
    const changed = follower.topics.filter((its) => its === topic || topic === READY);
    for (const its of changed) follower.changed.add(its);
    if (changed.length) follower.wake();
  }
}

// The views refresh once, in case of changes that were not reported any more.
function lose() {
  if (isOpen) note(READY);
  isOpen = false;
}

function stop() {
  reading?.abort();
  reading = null;
  lose();
}

const stopUnused = () => followers.size || stop();

// Browsers allow few connections to one host, which all tabs share.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (followers.size) read();
});
