import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const { AI_URL, USER_TOKEN, QUESTION, TOOL_QUESTION, TOOL_RESULT } = process.env;
const model = new ChatOpenAI({ model: "gpt-oss-120b", apiKey: USER_TOKEN, configuration: { baseURL: AI_URL } });
const whole = (await model.invoke(QUESTION)).text;
let streamed = "";
for await (const part of await model.stream(QUESTION)) streamed += part.text;
const cities = [];
const weather = tool(
  ({ city }) => {
    cities.push(city);
    return TOOL_RESULT;
  },
  { name: "weather", description: "Says what the weather is like.", schema: z.object({ city: z.string() }) },
);
const agent = createAgent({ model, tools: [weather] });
const { messages } = await agent.invoke({ messages: [{ role: "user", content: TOOL_QUESTION }] });
console.log(JSON.stringify([whole, streamed, ...cities, messages.at(-1).text]));
