"""The fields that the OpenAI format forwards, limits, prices, ignores and refuses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MultimodalUnsupported, RequestMalformed, ServiceError
from gateway.inference.formats import openai
from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.gateway.inference.formats.bodies import MODEL, PATH, json_bytes, price, read_payload, refusal_of, user
from tests.support.accounts import App
from tests.support.prices import max_cost

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "café ☀"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Says it", "parameters": PARAMETERS}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "é" * 50, "schema": {"enum": [f"value {n}" for n in range(2_000)], "maximum": 10**25}},
}


@pytest.mark.asyncio(loop_scope="session")
async def test_forwarded_priced_and_ignored_fields(app: App, provider: FakeProvider) -> None:
    """If a schema were not priced, one of 25,000 tokens would cost more than its reservation, and exceed the cap."""
    prompt = provider.plays(tokens("x", usage=None))
    priced = {"response_format": SCHEMA, "stop": ["é" * 500, "\n"], "reasoning_effort": "very " * 1_000}
    numbers = {"temperature": 0.123456789, "top_p": 0.9, "seed": 2**62}
    numbers |= {"frequency_penalty": 0.1, "presence_penalty": -0.1}
    ignored = {
        "user": "cormorant-1",
        "metadata": {"a": "cormorant-2"},
        "store": True,
        "service_tier": "cormorant-3",
        "logit_bias": {"50256": -100},
        "whatever": ["cormorant-4"],
        "n": 1,
        "modalities": ["text"],
    }
    body = {"model": MODEL, "messages": user(prompt), "max_tokens": 10, **priced, **numbers, **ignored}
    assert (await app.post(body, path=PATH)).status_code == 200
    sent = provider.asked(prompt)[0].json
    assert sent == {
        "model": MODEL,
        "messages": user(prompt),
        "max_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
        **priced,
        **numbers,
    }
    assert await app.account.settled() == max_cost(prompt + "x" * sum(map(json_bytes, priced.values())), 10)


def test_only_the_body_makes_a_stream() -> None:
    for stream in (True, False):
        body = json.dumps({"messages": user("x"), "stream": stream}).encode()
        assert openai.read_completion_request(body, not stream).stream == stream


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(("asked", "sent"), [(50, 50), (2001, 2000), (None, 2000), (100.0, 100)])
def test_lengths_above_the_limit_are_reduced(field: str, asked: float | None, sent: int) -> None:
    payload, _ = read_payload(openai, {"messages": user("x"), field: asked, "seed": 7.0, "n": 1.0})
    assert (json.dumps(payload["max_tokens"]), "max_completion_tokens" in payload) == (str(sent), False)
    assert json.dumps(payload["seed"]) == "7"


def said(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def result(call: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content, **fields}


SYSTEM = {"role": "system", "content": "Be brief. ☀"}
JOINED = "Be brief. ☀\n\nBe\nkind.\n\nNow in French."
THOUGHTS = "Größer als 3? ☀"
MORE = [CALL | {"id": "call_2"}]
# What a client sends, what the provider gets, and what is priced.
HISTORIES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], int]] = {
    "one message": (user("Hello"), user("Hello"), price("Hello")),
    "one system text": ([SYSTEM, *user("Hello")], [SYSTEM, *user("Hello")], price("Be brief. ☀Hello", messages=2)),
    "parts": (
        [*user([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo ü"}]), said("Oui?"), *user("What?")],
        [*user("Hel\nlo ü"), said("Oui?"), *user("What?")],
        price("Hel\nlo üOui?What?", messages=3),
    ),
    # Some chat templates refuse a system message that is not the first one; others drop it in silence.
    "system texts": (
        [
            *user("Hello"),
            SYSTEM,
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
            {"role": "system", "content": ""},
            {"role": "system", "content": "Now in French.", "name": "middleware"},
        ],
        [{"role": "system", "content": JOINED}, *user("Hello")],
        price(f"{JOINED}Hello", messages=2),
    ),
    # Some providers read the one name, some the other; none reads both.
    **{
        name: (
            [*user("Why?"), said("No", **{name: THOUGHTS})],
            [*user("Why?"), said("No", reasoning=THOUGHTS, reasoning_content=THOUGHTS)],
            price(f"Why?No{THOUGHTS}", messages=2),
        )
        for name in ("reasoning", "reasoning_content")
    },
    "parts of the assistant": (
        [
            said(
                [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "output_text", "text": "No.", "annotations": []},
                    {"type": "refusal", "refusal": "I won't."},
                ],
                refusal=None,
                audio=None,
                reasoning=None,
            ),
            said(None, refusal="Never."),
        ],
        [said("No.\nI won't.", reasoning="Hm.", reasoning_content="Hm."), said("Never.")],
        price("No.\nI won't.Hm.Never.", messages=2),
    ),
    # Histories from SDKs may have assistant messages with a null, or without content.
    "calls": (
        [
            *user("How?"),
            said(None, tool_calls=[CALL], refusal=None, function_call=None),
            result("call_1", "17 °C", name="weather"),
            {"role": "assistant", "tool_calls": MORE},
            result("call_2", [{"type": "text", "text": "rain"}]),
            said("Wet.", tool_calls=[]),
            said(None, tool_calls=None),
            said("", tool_calls=[CALL]),
        ],
        [
            *user("How?"),
            said(None, tool_calls=[CALL]),
            result("call_1", "17 °C"),
            said(None, tool_calls=MORE),
            result("call_2", "rain"),
            said("Wet."),
            said(""),
            said(None, tool_calls=[CALL]),
        ],
        price("How?17 °CrainWet.", [CALL], "call_1", MORE, "call_2", [CALL], messages=8),
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_sent_and_priced(name: str) -> None:
    messages, sent, priced = HISTORIES[name]
    choice = {"type": "function", "function": {"name": "weather"}}
    for fields in ({}, {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}):
        payload, text_bytes = read_payload(openai, {"messages": messages, **fields})
        assert payload["messages"] == sent
        assert {name: payload[name] for name in fields} == fields
        assert text_bytes == priced + price("", *fields.values())


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": [], "parallel_tool_calls": True}], ids=str)
def test_an_empty_list_of_tools_is_ignored(fields: dict[str, Any]) -> None:
    payload, text_bytes = read_payload(openai, {"messages": user("x"), **fields})
    assert not payload.keys() & {"tools", "tool_choice", "parallel_tool_calls"}
    assert text_bytes == 1


DEEP = '{"x":' * 9_000 + "1" + "}" * 9_000
# Arguments in a history, and what is sent, because chat templates parse it.
SENT_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "{}"),
    "empty": ({"arguments": ""}, "{}"),
    "plain": ({"arguments": ' {"x": 1.50, "y": "é"}'}, ' {"x": 1.50, "y": "é"}'),
    "cut": ({"arguments": '{"contents": "abc'}, "{}"),
    "deep": ({"arguments": DEEP}, "{}"),
    "an object": ({"arguments": {"city": "Zürich", "days": [1, 2.5]}}, '{"city":"Zürich","days":[1,2.5]}'),
    "an object with half a character": ({"arguments": {"x": "a\ud83d"}}, '{"x":"a\ufffd"}'),
    "half a character as an escape": ({"arguments": '{"x": "a\\ud83d"}'}, '{"x": "a\\ufffd"}'),
    "a list": ({"arguments": ["x"]}, "{}"),
}


@pytest.mark.parametrize("case", SENT_BACK)
def test_a_call_is_sent_back_with_an_object_for_arguments(case: str) -> None:
    """A call that was cut at the limit of tokens stays in the history, and every later request would fail."""
    given, expected = SENT_BACK[case]
    call = {"id": "call_1", "type": "function", "function": {"name": "now", **given}}
    payload, text_bytes = read_payload(openai, {"messages": [*user("When?"), said(None, tool_calls=[call])]})
    sent = payload["messages"][1]["tool_calls"]
    assert sent == [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": expected}}]
    assert text_bytes == price("When?", sent, messages=2)


@given(st.text(st.characters() | st.sampled_from("\\u\ud83d\ude00"), min_size=1, max_size=12))
def test_any_text_of_a_script_is_read(text: str) -> None:
    """JavaScript's strings may have halves anywhere, and `JSON.stringify` writes them as escapes."""
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert read_payload(openai, {"messages": user(text), "model": MODEL})[0]["messages"] == user(expected)


SECRET = "cormorant"
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SECRET}"}}
TEXT_PART = {"type": "text", "text": "What is this?"}
TWO = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
ROLES = "messages[0].role: must be one of assistant, developer, system, tool, user."
# Fields of a body, and what the message contains. Faults are named by the client's own numbers of messages.
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "functions": ({"functions": [{"name": SECRET}]}, "`functions`"),
    "two choices": ({"n": 2}, "`n`"),
    "logprobs": ({"logprobs": True}, "`logprobs`"),
    "no messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": SECRET, "content": "x"}]}, ROLES),
    "a role that looks like a path": ({"messages": [{"role": f"x' - at `$.{SECRET}` - at "}]}, ROLES),
    "a message without a role": ({"messages": [{"content": SECRET}]}, "role"),
    "a question of null": ({"messages": [*TWO, *user(None)]}, "messages[2].content: "),
    "an assistant who said nothing": ({"messages": [said(None)]}, "no text"),
    "no length": ({"max_tokens": 0.0}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens: must be a whole number"),
    "a huge seed": ({"seed": 2**63}, "seed"),
    "a choice without tools": ({"tool_choice": "auto"}, "`tool_choice`"),
    "an unknown choice": ({"tools": [TOOL], "tool_choice": SECRET}, "tool_choice"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {"description": SECRET}}]}, "name"),
    "a schema that is text": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SECRET}}]},
        "parameters",
    ),
    "a result without its call": ({"messages": [{"role": "tool", "content": SECRET}]}, "tool_call_id"),
    "a result of null": ({"messages": [result(SECRET, None)]}, "messages[0].content"),
    "a call without an id": ({"messages": [said(None, tool_calls=[{"function": CALL["function"]}])]}, "id"),
}
MULTIMODAL: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"messages": [*TWO, *user([TEXT_PART, IMAGE])]}, "messages[2].content[1].type: "),
    "an unknown part": ({"messages": user([{"type": SECRET}])}, "messages[0].content[0].type: "),
    "spoken answers": ({"modalities": ["text", SECRET]}, ""),
}


@pytest.mark.parametrize("case", [*MALFORMED, *MULTIMODAL])
def test_a_refusal_names_the_fault_and_repeats_nothing(case: str) -> None:
    body, named = (MALFORMED | MULTIMODAL)[case]
    kind: type[ServiceError] = RequestMalformed if case in MALFORMED else MultimodalUnsupported
    refusal = refusal_of(openai, {"messages": user("Hello"), **body})
    assert type(refusal) is kind
    assert named in refusal.message
    assert SECRET not in refusal.message
