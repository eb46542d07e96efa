import asyncio
import json
import os

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=os.environ["AI_URL"], api_key=os.environ["USER_TOKEN"]))
cities = []


@function_tool
def weather(city: str) -> str:
    """Says what the weather is like."""
    cities.append(city)
    return os.environ["TOOL_RESULT"]


async def main():
    agent = Agent("assistant", model="gpt-oss-120b", tools=[weather])
    whole = (await Runner.run(agent, os.environ["QUESTION"])).final_output
    run = Runner.run_streamed(agent, os.environ["QUESTION"])
    streamed = ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed += event.data.delta
    said = (await Runner.run(agent, os.environ["TOOL_QUESTION"])).final_output
    print(json.dumps([whole, streamed, *cities, said]))


asyncio.run(main())
