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
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}

whole = client.responses.create(model=MODEL, input=os.environ["QUESTION"]).output_text
with client.responses.stream(model=MODEL, input=os.environ["QUESTION"]) as stream:
    streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert stream.get_final_response().output_text == streamed
history = [{"role": "user", "content": os.environ["TOOL_QUESTION"]}]
response = client.responses.create(model=MODEL, input=history, tools=[TOOL])
[call] = [item for item in response.output if item.type == "function_call"]
city = json.loads(call.arguments)["city"]
history += response.output
history.append({"type": "function_call_output", "call_id": call.call_id, "output": os.environ["TOOL_RESULT"]})
said = client.responses.create(model=MODEL, input=history, tools=[TOOL]).output_text
print(json.dumps([whole, streamed, city, said]))
