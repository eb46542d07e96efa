"""Tools in the OpenAI format: forwarding, prices, and the provider's calls."""

from typing import Any

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, call_part, chunk, tokens
from tests.fakes.server import CLOSE
from tests.gateway.inference.formats.chat import MODEL, PATH, json_bytes, sdk, user
from tests.support.accounts import App
from tests.support.prices import cost, max_cost
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "café ☀"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Says it", "parameters": PARAMETERS}}
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


async def test_a_whole_history_is_forwarded_and_priced(app: App, provider: FakeProvider) -> None:
    """Histories from SDKs may have assistant messages with a null, or without content."""
    result = provider.plays(tokens("x", usage=None))
    more = CALL | {"id": "call_2"}
    messages: list[dict[str, Any]] = [
        *user("How is it?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "function_call": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "17 °C", "name": "weather"},
        {"role": "assistant", "tool_calls": [more]},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Wet.", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": None},
        *user("And there?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "call_3"}]},
        {"role": "tool", "tool_call_id": "call_3", "content": result},
    ]
    choice = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    response = await app.post({"messages": messages, "max_tokens": 10, **fields}, path=PATH)
    assert response.status_code == 200
    (asked,) = provider.asked(result)
    assert {name: asked.json[name] for name in fields} == fields
    nothing: dict[str, Any] = {"role": "assistant", "content": ""}
    assert asked.json["messages"] == [
        messages[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "17 °C", "tool_call_id": "call_1"},
        {"role": "assistant", "content": None, "tool_calls": [more]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_2"},
        nothing | {"content": "Wet."},
        nothing,
        messages[7],
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "call_3"}]},
        {"role": "tool", "content": result, "tool_call_id": "call_3"},
    ]
    texts = "".join(m["content"] or "" for m in asked.json["messages"])
    others = [m[name] for m in asked.json["messages"] for name in ("tool_calls", "tool_call_id") if name in m]
    priced = sum(map(json_bytes, [*others, *fields.values()]))
    assert await app.account.settled() == max_cost(texts + "x" * priced, 10, messages=10)


@pytest.mark.parametrize("choice", ["none", "required"])
async def test_choices_are_forwarded(app: App, provider: FakeProvider, choice: str) -> None:
    prompt = provider.plays(tokens("x"))
    body = {"messages": user(prompt), "tools": [TOOL], "tool_choice": choice}
    assert (await app.post(body, path=PATH)).status_code == 200
    assert provider.asked(prompt)[0].json["tool_choice"] == choice


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": None}, {"tools": [], "parallel_tool_calls": True}], ids=str
)
async def test_an_empty_list_of_tools_is_ignored(app: App, provider: FakeProvider, fields: dict[str, Any]) -> None:
    prompt = provider.plays(tokens("x", usage=None))
    assert (await app.post({"messages": user(prompt), **fields}, path=PATH)).status_code == 200
    assert not provider.asked(prompt)[0].json.keys() & {"tools", "tool_choice", "parallel_tool_calls"}
    assert await app.account.settled() == max_cost(prompt)


REFUSED: dict[str, dict[str, Any]] = {
    "a choice without tools": {"tool_choice": "auto"},
    "an unknown choice": {"tools": [TOOL], "tool_choice": "cormorant"},
    "a choice without a name": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
    "a tool of another type": {"tools": [{"type": "custom", "custom": {"name": "cormorant"}}]},
    "a tool without a name": {"tools": [{"type": "function", "function": {"description": "cormorant"}}]},
    "a schema that is text": {"tools": [{"type": "function", "function": {"name": "f", "parameters": "cormorant"}}]},
    "parallel calls of another type": {"tools": [TOOL], "parallel_tool_calls": "cormorant"},
    "a result without its call": {"messages": [{"role": "tool", "content": "cormorant"}]},
    "a result of null": {"messages": [{"role": "tool", "tool_call_id": "cormorant", "content": None}]},
    "a call without an id": {"messages": [{"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}]},
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused(app: App, case: str) -> None:
    response = await app.post({"messages": user("Hello"), **REFUSED[case]}, path=PATH)
    error = refused(response, 400, "REQUEST_MALFORMED")
    assert "cormorant" not in error["message"]
    assert (await app.account.spend())["reserved"] == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_part_of_a_call_costs_the_maximum_after_a_cut(app: App, provider: FakeProvider, stream: bool) -> None:
    prompt = provider.plays(ROLE, call_part(0, id="call_1", name="weather", arguments=""), CLOSE)
    body = {"messages": user(prompt), "tools": [TOOL], "stream": stream}
    response = await app.post(body, path=PATH)
    assert "PROVIDER_ERROR" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 502)
    assert await app.account.settled() == max_cost(prompt + "x" * json_bytes([TOOL]))


DEEP = '{"x":' * 9_000 + "1" + "}" * 9_000
# Arguments in a history, and what is sent, because chat templates parse it.
SENT_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "{}"),
    "empty": ({"arguments": ""}, "{}"),
    "plain": ({"arguments": ' {"x": 1.50, "y": "é"}'}, ' {"x": 1.50, "y": "é"}'),
    "cut": ({"arguments": '{"contents": "abc'}, "{}"),
    "not JSON": ({"arguments": "city=Bern"}, "{}"),
    "a list as text": ({"arguments": "[]"}, "{}"),
    "deep": ({"arguments": DEEP}, "{}"),
    "an object": ({"arguments": {"city": "Zürich", "days": [1, 2.5]}}, '{"city":"Zürich","days":[1,2.5]}'),
    "an object with half a character": ({"arguments": {"x": "a\ud83d"}}, '{"x":"a\ufffd"}'),
    "half a character as an escape": ({"arguments": '{"x": "a\\ud83d"}'}, '{"x": "a\\ufffd"}'),
    "a list": ({"arguments": ["x"]}, "{}"),
}


@pytest.mark.parametrize("case", SENT_BACK)
async def test_a_call_is_sent_back_with_an_object_for_arguments(app: App, provider: FakeProvider, case: str) -> None:
    """A call that was cut at the limit of tokens stays in the history, and every later request would fail."""
    given, expected = SENT_BACK[case]
    prompt = provider.plays(tokens("x", usage=None))
    call = {"id": "call_1", "type": "function", "function": {"name": "now", **given}}
    messages = [*user("When?"), {"role": "assistant", "content": None, "tool_calls": [call]}, *user(prompt)]
    response = await app.post({"messages": messages, "tools": [TOOL], "max_tokens": 10}, path=PATH)
    assert response.status_code == 200, response.text
    (sent,) = provider.asked(prompt)[0].json["messages"][1]["tool_calls"]
    assert sent == {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": expected}}
    priced = json_bytes([sent]) + json_bytes([TOOL])
    assert await app.account.settled() == max_cost("When?" + prompt + "x" * priced, 10, messages=3)
