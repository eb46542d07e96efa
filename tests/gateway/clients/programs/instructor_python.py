import json
import os

import instructor
import openai
from pydantic import BaseModel


class Weather(BaseModel):
    city: str


sdk = openai.OpenAI(base_url=os.environ["AI_URL"], api_key=os.environ["USER_TOKEN"])
messages = [{"role": "user", "content": os.environ["JSON_QUESTION"]}]
by_json = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
by_tool = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)


def ask(client, text):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="gpt-oss-120b", messages=messages, response_model=Weather).city


parts = by_json.chat.completions.create_partial(model="gpt-oss-120b", messages=messages, response_model=Weather)
*_, last = parts
print(json.dumps([ask(by_json, os.environ["JSON_QUESTION"]), last.city, ask(by_tool, os.environ["TOOL_QUESTION"])]))
