import asyncio
import json
import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["AI_URL"], api_key=os.environ["USER_TOKEN"])
agent = Agent(OpenAIChatModel("gpt-oss-120b", provider=provider))
cities = []


@agent.tool_plain
def weather(city: str) -> str:
    cities.append(city)
    return os.environ["TOOL_RESULT"]


async def main():
    async with agent.run_stream(os.environ["QUESTION"]) as run:
        streamed = "".join([part async for part in run.stream_text(delta=True)])
    whole = (await agent.run(os.environ["QUESTION"])).output
    said = (await agent.run(os.environ["TOOL_QUESTION"])).output
    print(json.dumps([whole, streamed, *cities, said]))


asyncio.run(main())
