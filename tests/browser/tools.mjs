// Asks the gateway with a tool, through SDKs of npm. Its standard input holds, as JSON, the address, the token, and for
// each way of asking the question and the tool's result. It prints what each way answered, and with what it ran the tool.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { text } from "node:stream/consumers";

const { baseURL, apiKey, model, questions } = JSON.parse(await text(process.stdin));
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const cities = {};

function weather(way, result) {
  return ({ city }) => {
    (cities[way] ??= []).push(city);
    return result;
  };
}

function withOpenAI(way, { prompt, result }, stream) {
  const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
  const described = { name: "weather", description: "Says it", parameters, parse: JSON.parse };
  const tools = [{ type: "function", function: { ...described, function: weather(way, result) } }];
  const messages = [{ role: "user", content: prompt }];
  return client.chat.completions.runTools({ model, messages, tools, stream }).finalContent();
}

async function withVercel(way, { prompt, result }, ask) {
  const tools = { weather: tool({ inputSchema: jsonSchema(parameters), execute: weather(way, result) }) };
  const chat = createOpenAI({ baseURL, apiKey }).chat(model);
  return await ask({ model: chat, prompt, tools, stopWhen: stepCountIs(3), maxRetries: 0 }).text;
}

const ways = {
  "openai, whole": (...asked) => withOpenAI(...asked, false),
  "openai, stream": (...asked) => withOpenAI(...asked, true),
  "ai, whole": (...asked) => withVercel(...asked, (options) => ({ text: generateText(options).then((r) => r.text) })),
  "ai, stream": (...asked) => withVercel(...asked, streamText),
};
const answers = await Promise.all(
  Object.entries(questions).map(async ([way, question]) => {
    const answer = await ways[way](way, question);
    return [way, { answer, cities: cities[way] ?? [] }];
  }),
);
const hint = await generateText({ model: createOpenAI({ baseURL, apiKey })(model), prompt: "x", maxRetries: 0 }).catch(
  (error) => error.message,
);
console.log(JSON.stringify({ answers: Object.fromEntries(answers), hint }));
