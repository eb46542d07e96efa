import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { AI_URL, USER_TOKEN, QUESTION, TOOL_QUESTION, TOOL_RESULT } = process.env;
const model = createOpenAI({ baseURL: AI_URL, apiKey: USER_TOKEN })("gpt-oss-120b");
const { text: whole } = await generateText({ model, prompt: QUESTION });
let streamed = "";
for await (const part of streamText({ model, prompt: QUESTION }).textStream) streamed += part;
const cities = [];
const weather = tool({
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return TOOL_RESULT;
  },
});
const { text: said } = await generateText({
  model,
  prompt: TOOL_QUESTION,
  tools: { weather },
  stopWhen: stepCountIs(3),
});
console.log(JSON.stringify([whole, streamed, ...cities, said]));
