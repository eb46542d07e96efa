"""A tool's round trip through OpenAI's SDK: the model calls it in pieces, the client runs it, the model answers.

`make check-clients` does the same with the newest release of each client that the documentation names.
"""

import json
from typing import Any, NamedTuple

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import call_part, calls, tokens
from tests.gateway.inference.formats.chat import MODEL, sdk
from tests.support.accounts import App
from tests.support.prices import cost

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Question(NamedTuple):
    prompt: str
    result: str  # of the tool


def question(provider: FakeProvider) -> Question:
    begin = call_part(0, id="call_1", name="weather", arguments="")
    prompt = provider.plays(calls(begin, call_part(0, arguments='{"city": '), call_part(0, arguments='"Zürich"}')))
    return Question(prompt, provider.plays(tokens("It", " rains.")))


async def completed(app: App, provider: FakeProvider, *questions: Question) -> None:
    """Checks that two requests were sent, the second one with the call and its result, and both were charged."""
    for prompt, result in questions:
        (first,), (second,) = provider.asked(prompt), provider.asked(result)
        assert second.json["tools"] == first.json["tools"]
        user, assistant, tool = second.json["messages"]
        assert (user["role"], user["content"]) == ("user", prompt)
        (call,) = assistant["tool_calls"]
        assert (call["id"], call["function"]["name"]) == ("call_1", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Zürich"}
        assert tool == {"role": "tool", "tool_call_id": "call_1", "content": result}
    assert await app.account.settled() == len(questions) * (cost(9, 4) + cost(7, 3))


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}


async def test_openai_python(app: App, provider: FakeProvider) -> None:
    """It repeats the model's message with a null in each field that was absent."""
    whole, streamed = question(provider), question(provider)
    async with sdk(app) as client:

        async def ask(messages: list[Any], stream: bool) -> Any:
            asked = {"model": MODEL, "messages": messages, "tools": [TOOL]}
            if not stream:
                return (await client.chat.completions.create(**asked)).choices[0].message
            async with client.chat.completions.stream(**asked) as events:
                return (await events.get_final_completion()).choices[0].message

        for (prompt, result), stream in ((whole, False), (streamed, True)):
            messages: list[Any] = [{"role": "user", "content": prompt}]
            message = await ask(messages, stream)
            (call,) = message.tool_calls
            messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
            assert (await ask(messages, stream)).content == "It rains."
    await completed(app, provider, whole, streamed)
