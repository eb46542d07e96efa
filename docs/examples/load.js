// Simulates users who stream answers, with k6. docs/load-testing.md explains how to run it and how to read its results.
//
// k6 run -e URL=https://api.example.com -e APP=notes -e SESSION_URL=https://… --vus 20 --duration 2m load.js

import { sleep } from "k6";
import http from "k6/http";
import { Counter, Trend } from "k6/metrics";

const ADDRESS = `${__ENV.URL}/capsule/${__ENV.APP}/ai`;
const BODY = JSON.stringify({ prompt: __ENV.PROMPT || "What is a capsule?", stream: true, maxTokens: 200 });
const TOKEN_MS = 300_000; // the lifetime of a user's token, with a margin

// Only answered requests are timed: refusals are fast and would make the answers look fast, too.
const firstToken = new Trend("first_token", true);
const timePerToken = new Trend("time_per_token", true);
const answer = new Trend("answer", true);
const tokens = new Counter("tokens"); // k6 also prints it per second
const unfinished = new Counter("unfinished_answers");
const refused = {
  APP_RATE_LIMITED: new Counter("refused_app_rate"),
  USER_RATE_LIMITED: new Counter("refused_user_rate"),
  SPEND_CAP_REACHED: new Counter("refused_spend_cap"),
  PROVIDER_QUOTA_EXHAUSTED: new Counter("refused_provider_quota"),
};
const refusedElse = new Counter("refused_else");

// Each virtual user has its own copy of these variables, and so its own token.
let token;
let signInAt = 0;

// Change this to what your app's backend expects.
function signIn() {
  const response = http.post(__ENV.SESSION_URL, null, { headers: { Accept: "text/plain" } });
  if (response.status !== 200) throw new Error(`The sign-in failed with status ${response.status}.`);
  token = response.body;
  signInAt = Date.now() + TOKEN_MS;
}

function errorCode(body) {
  try {
    return JSON.parse(body).error.code;
  } catch {
    return "without a code"; // for example from a proxy
  }
}

export default function () {
  if (Date.now() > signInAt) signIn();
  const response = http.post(ADDRESS, BODY, {
    headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
    timeout: "310s",
  });
  if (response.status === 200) report(response);
  else {
    const code = errorCode(response.body);
    (refused[code] || refusedElse).add(1, { code });
    sleep(Math.min(Number(response.headers["Retry-After"] || 0), 60));
  }
  sleep(1 + 2 * Math.random());
}

// k6 returns a response when it is complete. The gateway sends the status with the first token, or with a keep-alive
// after 15 s. So k6's time to the first byte is the time to the first token, and its time for the rest is that of the
// others.
function report(response) {
  const { waiting, receiving, duration } = response.timings;
  const count = (response.body.match(/^data: \{"token":/gm) || []).length;
  tokens.add(count);
  answer.add(duration);
  if (count > 0) firstToken.add(waiting);
  if (count > 1) timePerToken.add(receiving / (count - 1));
  if (!/^event: done$/m.test(response.body)) unfinished.add(1);
}
