import json
import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="gpt-oss-120b", base_url=os.environ["AI_URL"], api_key=os.environ["USER_TOKEN"])
cities = []


def weather(city: str) -> str:
    """Says what the weather is like."""
    cities.append(city)
    return os.environ["TOOL_RESULT"]


question = os.environ["QUESTION"]
streamed = "".join(part.text for part in model.stream(question))
asked = {"messages": [{"role": "user", "content": os.environ["TOOL_QUESTION"]}]}
said = create_agent(model, [weather]).invoke(asked)["messages"][-1].text
print(json.dumps([model.invoke(question).text, streamed, *cities, said]))
