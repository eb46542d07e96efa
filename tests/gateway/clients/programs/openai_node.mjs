import OpenAI from "openai";

const { AI_URL, USER_TOKEN, QUESTION, TOOL_QUESTION, TOOL_RESULT } = process.env;
const client = new OpenAI({ baseURL: AI_URL, apiKey: USER_TOKEN });
const model = "gpt-oss-120b";
const messages = [{ role: "user", content: QUESTION }];
const whole = (await client.chat.completions.create({ model, messages })).choices[0].message.content;
let streamed = "";
for await (const part of await client.chat.completions.create({ model, messages, stream: true })) {
  streamed += part.choices[0]?.delta.content ?? "";
}
const cities = [];
const weather = ({ city }) => {
  cities.push(city);
  return TOOL_RESULT;
};
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { name: "weather", function: weather, parse: JSON.parse, parameters };
const said = await client.chat.completions
  .runTools({ model, messages: [{ role: "user", content: TOOL_QUESTION }], tools: [{ type: "function", function: tool }] })
  .finalContent();
console.log(JSON.stringify([whole, streamed, ...cities, said]));
