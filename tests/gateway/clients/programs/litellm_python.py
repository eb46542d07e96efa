import json
import os

import litellm

MODEL = "openai/gpt-oss-120b"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def ask(messages, **more):
    return litellm.completion(
        model=MODEL, api_base=os.environ["AI_URL"], api_key=os.environ["USER_TOKEN"], messages=messages, **more
    )


question = [{"role": "user", "content": os.environ["QUESTION"]}]
streamed = "".join(part.choices[0].delta.content or "" for part in ask(question, stream=True) if part.choices)
messages = [{"role": "user", "content": os.environ["TOOL_QUESTION"]}]
message = ask(messages, tools=[TOOL]).choices[0].message
[call] = message.tool_calls
city = json.loads(call.function.arguments)["city"]
messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": os.environ["TOOL_RESULT"]}]
said = ask(messages, tools=[TOOL]).choices[0].message.content
print(json.dumps([ask(question).choices[0].message.content, streamed, city, said]))
