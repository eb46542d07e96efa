// Asks the model as the app's users do, with a test token, and shows the call as code.

import { h } from "/pages/dom.js";
import { count } from "/pages/format.js";
import { call, get, readEvents } from "./api.js";
import { announce, card, choice, field, heading, refusal, run } from "./parts.js";
import { snippet } from "./snippets.js";

export const title = "Try it";

const DEFAULT_MAXIMUM = 500;
const EFFORTS = ["low", "medium", "high"];
const MARGIN = 30_000; // ms before its end, at which a token is replaced

export async function draw(signal, { app: name }) {
  const at = `/account/apps/${encodeURIComponent(name)}`;
  const [{ models, defaultModel, limits }] = await Promise.all([get("/capabilities", signal), get(at, signal)]);
  const model = choice("model", models);
  model.value = defaultModel;
  const maximum = h("input", {
    id: "maximum",
    type: "number",
    min: "1",
    max: limits.maxOutputTokens,
    value: Math.min(DEFAULT_MAXIMUM, limits.maxOutputTokens),
    required: true,
  });
  const effort = h("select", { id: "effort" }, h("option", { value: "" }, "default"), EFFORTS.map((each) => h("option", {}, each)));
  const prompt = h("textarea", { id: "prompt", rows: "4", required: true }, "What is a capsule?");
  const read = () => ({
    prompt: prompt.value,
    model: model.value,
    maxTokens: Number(maximum.value),
    ...(effort.value && { reasoningEffort: effort.value }),
  });
  const code = h("div", { class: "stack" });
  const showCode = () => code.replaceChildren(...snippets(name, read()));
  for (const control of [model, maximum, effort, prompt]) control.addEventListener("input", showCode);
  showCode();
  return [
    heading(`Try ${name}`, "Asks the model as the user “owner” of this app. The app pays for it, and its limits apply."),
    asking(name, at, read, [model, maximum, effort, prompt], signal),
    card("The same call", h("p", { class: "quiet" }, "Your users send their own tokens in place of the test token."), code),
  ];
}

function asking(name, at, read, [model, maximum, effort, prompt], signal) {
  const line = refusal();
  const answer = h("pre", { class: "log answer", role: "region", tabindex: "0", "aria-label": "Answer" });
  const about = h("p", { class: "small quiet" });
  const ask = h("button", { class: "main" }, "Ask");
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const tokens = new TestTokens(at, signal);
  let stopping = null;
  stop.addEventListener("click", () => stopping?.abort());
  const submit = async (event) => {
    event.preventDefault();
    if (stopping) return;
    stopping = new AbortController();
    stop.disabled = false;
    about.textContent = answer.textContent = "";
    const either = AbortSignal.any([signal, stopping.signal]);
    await run(line, async () => {
      await stream(`/capsule/${name}/ai`, await tokens.get(), read(), either, {
        token: (text) => answer.append(text),
        done: (end) => {
          about.textContent = describe(end);
          if (!answer.textContent && end.finishReason === "length") line.textContent = EMPTY;
        },
      });
      if (!line.textContent) announce("The answer is complete.");
    });
    if (stopping.signal.aborted) about.textContent ||= "Stopped. A stopped answer is charged at its maximum cost.";
    stopping = null;
    stop.disabled = true;
  };
  const form = h(
    "form",
    { class: "stack", onsubmit: submit },
    h("div", { class: "fields" }, field("Model", model), field("Maximum number of tokens", maximum), field("Thinking", effort)),
    field("Text", prompt),
    h("div", { class: "row" }, ask, stop),
    line,
    answer,
    about,
  );
  return card("Ask", form);
}

// Thinking and answer share the maximum.
const EMPTY = "The model used the maximum number of tokens for thinking. Allow more tokens, or less thinking.";
const FINISHES = { length: "It reached the maximum number of tokens.", stop: "It is complete." };

const describe = ({ finishReason, usage }) =>
  [FINISHES[finishReason], usage && `${count(usage.inputTokens)} tokens in, ${count(usage.outputTokens)} out.`]
    .filter(Boolean)
    .join(" ");

// The page's test token, which is made when it is needed and replaced before it ends.
class TestTokens {
  constructor(at, signal) {
    Object.assign(this, { at, signal, token: "", expiresAt: 0 });
  }

  async get() {
    if (this.expiresAt - Date.now() < MARGIN) {
      const { token, expiresAt } = await call("POST", `${this.at}/test-token`, { signal: this.signal });
      Object.assign(this, { token, expiresAt: Date.parse(expiresAt) });
    }
    return this.token;
  }
}

// Calls `take.token` with each token, and `take.done` with the end of the answer.
async function stream(path, token, body, signal, take) {
  for await (const { event, data } of readEvents(path, { ...body, stream: true }, token, signal)) {
    if (event === "done") take.done(data);
    else take.token(data.token);
  }
}

// -- code -------------------------------------------------------------------------------------------------------

function snippets(name, { prompt, model, maxTokens, reasoningEffort }) {
  const url = `${location.origin}/capsule/${name}/ai`;
  const body = { prompt, model, maxTokens, ...(reasoningEffort && { reasoningEffort }) };
  const quoted = JSON.stringify({ ...body, stream: true }).replaceAll("'", "'\\''");
  return [
    snippet(
      "curl",
      `curl -N ${url} -H "Authorization: Bearer $USER_TOKEN" \\\n  -H 'Content-Type: application/json' \\\n  -d '${quoted}'`,
    ),
    snippet(
      "JavaScript",
      [
        `const response = await fetch(${JSON.stringify(url)}, {`,
        `  method: "POST",`,
        "  headers: { Authorization: `Bearer ${userToken}`, \"Content-Type\": \"application/json\" },",
        "  body: JSON.stringify({",
        ...Object.entries(body).map(([field, value]) => `    ${field}: ${JSON.stringify(value)},`),
        "  }),",
        "});",
        "const { text } = await response.json();",
      ].join("\n"),
    ),
    snippet(
      "Python",
      [
        "from openai import OpenAI",
        "",
        `client = OpenAI(base_url=${JSON.stringify(url)}, api_key=user_token)`,
        "stream = client.chat.completions.create(",
        `    model=${JSON.stringify(model)},`,
        `    max_tokens=${maxTokens},`,
        ...(reasoningEffort ? [`    reasoning_effort=${JSON.stringify(reasoningEffort)},`] : []),
        `    messages=[{"role": "user", "content": ${JSON.stringify(prompt)}}],`,
        "    stream=True,",
        ")",
        "for chunk in stream:",
        `    if chunk.choices:`,
        `        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
      ].join("\n"),
    ),
    snippet(
      "Python, with the Responses API",
      [
        "from openai import OpenAI",
        "",
        `client = OpenAI(base_url=${JSON.stringify(url)}, api_key=user_token)`,
        "response = client.responses.create(",
        `    model=${JSON.stringify(model)},`,
        `    max_output_tokens=${maxTokens},`,
        ...(reasoningEffort ? [`    reasoning={"effort": ${JSON.stringify(reasoningEffort)}},`] : []),
        `    input=${JSON.stringify(prompt)},`,
        ")",
        "print(response.output_text)",
      ].join("\n"),
    ),
  ];
}
