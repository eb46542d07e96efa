import asyncio
import json
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model="gpt-oss-120b",
    api_base=os.environ["AI_URL"],
    api_key=os.environ["USER_TOKEN"],
    is_chat_model=True,
    is_function_calling_model=True,
)
cities = []


def weather(city: str) -> str:
    """Says what the weather is like."""
    cities.append(city)
    return os.environ["TOOL_RESULT"]


async def main():
    streamed = "".join(part.delta or "" for part in model.stream_complete(os.environ["QUESTION"]))
    whole = model.complete(os.environ["QUESTION"]).text
    said = str(await FunctionAgent(tools=[weather], llm=model).run(os.environ["TOOL_QUESTION"]))
    print(json.dumps([whole, streamed, *cities, said]))


asyncio.run(main())
