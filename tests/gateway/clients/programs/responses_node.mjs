import OpenAI from "openai";

const { AI_URL, USER_TOKEN, QUESTION, TOOL_QUESTION, TOOL_RESULT } = process.env;
const client = new OpenAI({ baseURL: AI_URL, apiKey: USER_TOKEN });
const model = "gpt-oss-120b";
const whole = (await client.responses.create({ model, input: QUESTION })).output_text;
let streamed = "";
const stream = client.responses.stream({ model, input: QUESTION });
for await (const event of stream) if (event.type === "response.output_text.delta") streamed += event.delta;
if ((await stream.finalResponse()).output_text !== streamed) throw new Error("the last event says something else");
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const input = [{ role: "user", content: TOOL_QUESTION }];
const { output } = await client.responses.create({ model, input, tools });
const call = output.find((item) => item.type === "function_call");
const { city } = JSON.parse(call.arguments);
input.push(...output, { type: "function_call_output", call_id: call.call_id, output: TOOL_RESULT });
const said = (await client.responses.create({ model, input, tools })).output_text;
console.log(JSON.stringify([whole, streamed, city, said]));
