import json
import os

import openai

client = openai.OpenAI(base_url=os.environ["AI_URL"], api_key=os.environ["USER_TOKEN"])
MODEL = "gpt-oss-120b"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}


def ask(messages, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **more)


question = [{"role": "user", "content": os.environ["QUESTION"]}]
stream = ask(question, stream=True)
streamed = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
messages = [{"role": "user", "content": os.environ["TOOL_QUESTION"]}]
message = ask(messages, tools=[TOOL]).choices[0].message
[call] = message.tool_calls
city = json.loads(call.function.arguments)["city"]
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": os.environ["TOOL_RESULT"]}]
said = ask(messages, tools=[TOOL]).choices[0].message.content
print(json.dumps([ask(question).choices[0].message.content, streamed, city, said]))
