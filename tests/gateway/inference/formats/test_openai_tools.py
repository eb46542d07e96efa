"""The provider's calls in the OpenAI format. test_openai_requests.py has the tools of requests."""

from typing import Any

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, call_part, chunk
from tests.fakes.server import CLOSE
from tests.gateway.inference.formats.chat import MODEL, PATH, json_bytes, sdk, user
from tests.support.accounts import App
from tests.support.prices import cost, max_cost

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("finish", "arguments"), [("length", ""), ("tool_calls", "{}")])
async def test_a_call_that_was_cut_before_its_arguments(
    app: App, provider: FakeProvider, finish: str, arguments: str, stream: bool
) -> None:
    """With `{}` for arguments, clients would run it."""
    cut = call_part(0, id="call_1", name="delete_all", arguments="")
    prompt = provider.plays([ROLE, cut, chunk(finish=finish), chunk(usage=(9, 4)), DONE])
    asked: dict[str, Any] = {"model": MODEL, "messages": user(prompt), "tools": [TOOL]}
    async with sdk(app) as client:
        if stream:
            choices = [c.choices[0] async for c in await client.chat.completions.create(**asked, stream=True)]
            received = [part for choice in choices for part in choice.delta.tool_calls or ()]
            end = choices[-1].finish_reason
        else:
            (choice,) = (await client.chat.completions.create(**asked)).choices
            received, end = choice.message.tool_calls, choice.finish_reason
    assert "".join(part.function.arguments for part in received) == arguments
    assert end == finish
    assert await app.account.settled() == cost(9, 4)


async def test_text_and_calls_in_one_answer(app: App, provider: FakeProvider) -> None:
    both = chunk("Let me look. ", tool_calls=[{"index": 0, **CALL}])
    prompt = provider.plays([ROLE, both, chunk(finish="tool_calls"), chunk(usage=(9, 4)), DONE])
    body = {"messages": user(prompt), "tools": [TOOL]}
    message = (await app.post(body, path=PATH)).json()["choices"][0]["message"]
    assert (message["content"], message["tool_calls"]) == ("Let me look. ", [CALL])
    events = (await app.post(body | {"stream": True}, path=PATH)).text
    assert events.index('"content":"Let me look. "') < events.index('"id":"call_1"')


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_part_of_a_call_costs_the_maximum_after_a_cut(app: App, provider: FakeProvider, stream: bool) -> None:
    prompt = provider.plays(ROLE, call_part(0, id="call_1", name="weather", arguments=""), CLOSE)
    body = {"messages": user(prompt), "tools": [TOOL], "stream": stream}
    response = await app.post(body, path=PATH)
    assert "PROVIDER_ERROR" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 502)
    assert await app.account.settled() == max_cost(prompt + "x" * json_bytes([TOOL]))
