"""The Responses format, through the real SDK and over HTTP."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from gateway.errors import MultimodalUnsupported, RequestMalformed
from gateway.inference.formats import openai as chat
from gateway.inference.formats import responses
from gateway.inference.formats.completion import FullAnswer
from gateway.inference.provider.chunks import Delta
from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, call_part, calls, chunk, tokens
from tests.fakes.server import CLOSE
from tests.gateway.inference.formats.bodies import MODEL, read_payload, refusal_of, sdk
from tests.support.accounts import App
from tests.support.metrics import metric
from tests.support.prices import cost, max_cost

session = pytest.mark.asyncio(loop_scope="session")

PATH = "/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
TOOL = {"type": "function", "name": "weather", "description": "Says it", "parameters": PARAMETERS, "strict": True}
CALLS = calls(
    call_part(0, id="call_1", name="weather", arguments=""),
    call_part(0, arguments='{"city": "Z'),
    call_part(1, id="call_2", name="weather", arguments='{"city": "Bern"}'),
    call_part(0, arguments='ürich"}'),
)


@pytest_asyncio.fixture(loop_scope="session")
async def client(app: App) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk(app) as client:
        yield client


def read_events(text: str) -> list[dict[str, Any]]:
    """Returns the data of the events, whose names are their types."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        if not event.startswith(":"):
            name, _, data = event.partition("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


# -- answers ---------------------------------------------------------------------------------------------------


@session
async def test_a_whole_answer(app: App, client: openai.AsyncOpenAI, provider: FakeProvider) -> None:
    counter = 'gateway_requests_total{code="",format="responses",status="200"}'
    counted = await metric(app.gateway, counter)
    prompt = provider.plays(tokens("Bon", "jour ☀", usage=(7, 3)))
    response = await client.responses.create(model=MODEL, input=prompt, metadata={"a": "b"}, store=True)
    assert (response.object, response.status, response.output_text) == ("response", "completed", "Bonjour ☀")
    assert (response.model, response.metadata, response.error) == (MODEL, {"a": "b"}, None)
    assert response.usage
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 3, 10)
    assert response.to_dict()["store"] is False
    assert await app.account.settled() == cost(7, 3)
    assert await metric(app.gateway, counter) == counted + 1


@session
async def test_the_events_of_an_answer(app: App, provider: FakeProvider) -> None:
    pieces = [chunk(reasoning="hm"), chunk("Bon"), 0.1, chunk("jour"), 0.1, chunk(" à"), chunk(" tous"), 0.1]
    prompt = provider.plays(ROLE, *pieces, chunk(finish="stop"), chunk(usage=(7, 3)), DONE)
    response = await app.post({"input": prompt, "stream": True}, path=PATH)
    events = read_events(response.text)
    text = ["response.output_text.delta"] * 4 + ["response.output_text.done"]
    item = ["response.content_part.done", "response.output_item.done"]
    begun = ["response.output_item.added", "response.content_part.added"]
    thought = ["response.reasoning_text.delta", "response.reasoning_text.done"]
    middle = [*begun, *thought, *item, *begun, *text, *item]
    whole = ["response.created", "response.in_progress", *middle, "response.completed"]
    assert [e["type"] for e in events] == whole
    assert [e["sequence_number"] for e in events] == [*range(len(events))]
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    last = events[-1]["response"]
    assert last["id"] == events[0]["response"]["id"]
    assert last["output"] == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [each["type"] for each in last["output"]] == ["reasoning", "message"]
    assert last["output"][1]["content"][0]["text"] == "Bonjour à tous"
    assert await app.account.settled() == cost(7, 3)


@session
async def test_calls_in_pieces_are_joined(app: App, client: openai.AsyncOpenAI, provider: FakeProvider) -> None:
    """Pieces of two calls may be mixed."""
    for stream in (False, True):
        prompt = provider.plays(CALLS)
        if stream:
            async with client.responses.stream(model=MODEL, input=prompt, tools=[TOOL]) as events:
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(model=MODEL, input=prompt, tools=[TOOL])
        made = [(item.type, item.call_id, item.name, json.loads(item.arguments)["city"]) for item in response.output]
        assert made == [
            ("function_call", "call_1", "weather", "Zürich"),
            ("function_call", "call_2", "weather", "Bern"),
        ]
    assert await app.account.settled() == 2 * cost(9, 4)


@session
async def test_a_refusal_is_completed(client: openai.AsyncOpenAI, provider: FakeProvider) -> None:
    refusal = [ROLE, chunk(refusal="No"), chunk(refusal=", thanks."), chunk(finish="content_filter"), DONE]
    async with client.responses.stream(model=MODEL, input=provider.plays(*refusal)) as events:
        response: Any = await events.get_final_response()
    assert response.status == "completed"
    assert response.output[0].content[0].refusal == "No, thanks."


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_incomplete_answer_says_why(finish: str, reason: str) -> None:
    encoder, other = (responses.Responses("req_1", "m", asked=b'"store":false') for _ in range(2))
    events = read_events((encoder.chunks([Delta(content="a")]) + encoder.end("m", finish, None)).decode())
    assert events[-1]["type"] == "response.incomplete"
    for response in (events[-1]["response"], json.loads(other.full(FullAnswer("a", "", []), "m", finish, None))):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "a")


@session
async def test_a_stream_that_is_cut_has_failed(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk("a"), CLOSE)
    *_, last = read_events((await app.post({"input": prompt, "stream": True}, path=PATH)).text)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "PROVIDER_ERROR"
    assert await app.account.settled() == max_cost(prompt)


# -- requests --------------------------------------------------------------------------------------------------


def spoken(kind: str, text: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text}]


CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Zürich"}'}}
CALLED_TOO = {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ITEM = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c1", "name": "weather"}
# What a Responses request has, and the chat request that says the same.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({"input": "Hé"}, {"messages": [{"role": "user", "content": "Hé"}]}),
    "instructions": (
        {
            "instructions": "Be brief.",
            "input": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        },
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Hi"},
            ]
        },
    ),
    "a history with thinking and a call": (
        {
            "input": [
                {"role": "user", "content": spoken("input_text", "Hi")},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": spoken("reasoning_text", "Hm")},
                {"type": "message", "id": "msg_1", "role": "assistant", "content": spoken("output_text", "I look.")},
                {**ITEM, "arguments": '{"city":"Zürich"}'},
                {**ITEM, "call_id": "c2", "arguments": "{}"},
                {"type": "item_reference", "id": "rs_1"},
                {"type": "function_call_output", "call_id": "c1", "output": "It rains."},
                {"type": "function_call_output", "call_id": "c2", "output": "It snows."},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
        },
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "I look.", "reasoning": "Hm", "tool_calls": [CALLED, CALLED_TOO]},
                {"role": "tool", "tool_call_id": "c1", "content": "It rains."},
                {"role": "tool", "tool_call_id": "c2", "content": "It snows."},
            ],
            "tools": [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
        },
    ),
    "settings": (
        {
            "input": "Hi",
            "max_output_tokens": 50,
            "temperature": 0.5,
            "top_p": 0.9,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": PARAMETERS, "strict": True}},
            "include": ["reasoning.encrypted_content"],
            "truncation": "disabled",
            "user": "u",
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 50,
            "temperature": 0.5,
            "top_p": 0.9,
            "reasoning_effort": "low",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": PARAMETERS, "strict": True},
            },
        },
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_in_both_formats_costs_the_same(name: str) -> None:
    asked, said = SAME[name]
    assert read_payload(responses, asked) == read_payload(chat, said)


IMAGE = {"type": "input_image", "image_url": "https://cormorant.example/a.png"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"input": [{"role": "user", "content": [*spoken("input_text", "?"), IMAGE]}]}, "input[0].content[1]."),
    "an answer to continue": ({"previous_response_id": "resp_cormorant"}, "previous_response_id"),
    "a conversation": ({"conversation": {"id": "cormorant"}}, "conversation"),
    "an answer for later": ({"background": True}, "background"),
    "a kept prompt": ({"prompt": {"id": "cormorant"}}, "prompt"),
    "a kept prompt alone": ({"prompt": {"id": "cormorant"}, "input": None}, "prompt"),
    "another tool": ({"tools": [TOOL, {"type": "web_search_cormorant"}]}, "tools[1].type"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a shorter history": ({"truncation": "auto"}, "truncation"),
    "probabilities": ({"include": ["message.output_text.logprobs"]}, "include"),
    "more probabilities": ({"top_logprobs": 3}, "top_logprobs"),
    "no output": ({"input": [{"type": "function_call_output", "call_id": "cormorant"}]}, "output"),
    "an item of another kind": ({"input": [{"type": "cormorant"}]}, "input[0].type"),
    "what is stored": ({"input": [{"type": "item_reference", "id": "msg_cormorant"}]}, "`store`"),
    "a call without an id": ({"input": [{"type": "function_call", "name": "a"}]}, "call_id"),
    "a schema without a name": ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
    "no input": ({"input": None}, "input"),
    "no text": ({"input": []}, "no text"),
    "no answer at all": ({"max_output_tokens": 0}, "max_output_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name: str) -> None:
    body, named = REFUSED[name]
    refusal = refusal_of(responses, {"input": "Hi", **body})
    assert type(refusal) is (MultimodalUnsupported if name == "an image" else RequestMalformed)
    assert named in refusal.message
    assert "cormorant" not in refusal.message
