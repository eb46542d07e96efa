"""The fields that the OpenAI format forwards, limits, prices, ignores and refuses."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.formats.openai import read_completion_request
from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.gateway.inference.formats.chat import MODEL, PATH, json_bytes, user
from tests.support.accounts import App
from tests.support.prices import max_cost
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_forwarded_and_ignored_fields(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x"))
    passed = {
        "temperature": 0.3,
        "top_p": 0.9,
        "stop": ["\n\n", "END"],
        "seed": 7,
        "frequency_penalty": 0.1,
        "presence_penalty": -0.1,
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
    }
    ignored = {
        "user": "cormorant-1",
        "metadata": {"a": "cormorant-2"},
        "store": True,
        "service_tier": "cormorant-3",
        "logit_bias": {"50256": -100},
        "whatever": ["cormorant-4"],
        "n": 1,
    }
    body = {"model": MODEL, "messages": user(prompt), **passed, **ignored}
    assert (await app.post(body, path=PATH)).status_code == 200
    sent = provider.asked(prompt)[0].json
    assert {k: sent.get(k) for k in passed} == passed
    assert not {"user", "metadata", "store", "service_tier", "logit_bias", "whatever"} & sent.keys()
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(("asked", "sent"), [(50, 50), (2000, 2000), (2001, 2000), (None, 2000)])
async def test_lengths_above_the_limit_are_reduced(
    app: App, provider: FakeProvider, field: str, asked: int | None, sent: int
) -> None:
    prompt = provider.plays(tokens("x", usage=None))
    body = {"model": MODEL, "messages": user(prompt)} | ({} if asked is None else {field: asked})
    assert (await app.post(body, path=PATH)).status_code == 200
    upstream = provider.asked(prompt)[0].json
    assert {upstream[f] for f in ("max_tokens", "max_completion_tokens") if f in upstream} == {sent}
    assert await app.account.settled() == max_cost(prompt, sent)


async def test_all_messages_are_priced_and_sent(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x", usage=None), prompt="What then? ☀ b77e")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo ü"}]},
        {"role": "assistant", "content": "Oui?"},
        *user(prompt),
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 10}
    assert (await app.post(body, path=PATH)).status_code == 200
    sent = provider.asked(prompt)[0].json["messages"]
    assert sent == [messages[0], *user("Hel\nlo ü"), *messages[2:]]
    assert await app.account.settled() == max_cost("Be brief.Hel\nlo üOui?" + prompt, 10, messages=4)


async def test_system_texts_are_joined_in_the_first_message(app: App, provider: FakeProvider) -> None:
    """Some chat templates refuse a system message that is not the first one; others drop it in silence."""
    prompt = provider.plays(tokens("x", usage=None))
    messages = [
        *user("Hello"),
        {"role": "system", "content": "Be brief. ☀"},
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
        {"role": "assistant", "content": "Oui?"},
        {"role": "system", "content": ""},
        {"role": "system", "content": "Now in French.", "name": "middleware"},
        *user(prompt),
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 10}
    assert (await app.post(body, path=PATH)).status_code == 200
    system = "Be brief. ☀\n\nBe\nkind.\n\nNow in French."
    assert provider.asked(prompt)[0].json["messages"] == [
        {"role": "system", "content": system},
        *user("Hello"),
        {"role": "assistant", "content": "Oui?"},
        *user(prompt),
    ]
    assert await app.account.settled() == max_cost(system + "HelloOui?" + prompt, 10, messages=4)


@pytest.mark.parametrize(
    "messages", [user("Hello"), [{"role": "system", "content": "Be brief."}, *user("Hello")]], ids=["none", "one"]
)
async def test_a_plain_history_is_sent_as_it_is(messages: list[dict[str, Any]]) -> None:
    request = read_completion_request(json.dumps({"messages": messages}).encode(), False)
    assert json.loads(request.payload)["messages"] == messages


async def test_a_fault_is_named_by_the_callers_own_numbers(app: App) -> None:
    """They differ from those of the messages as sent, where the system's are joined."""
    first: list[dict[str, Any]] = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}
    response = await app.post({"messages": [*first, *user([image])]}, path=PATH)
    error = refused(response, 422, "MULTIMODAL_UNSUPPORTED")
    assert error["message"].startswith("messages[2].content[0].type: ")
    response = await app.post({"messages": [*first, *user(None)]}, path=PATH)
    assert refused(response, 400, "REQUEST_MALFORMED")["message"].startswith("messages[2].content: ")


async def test_half_of_a_surrogate_pair_is_replaced(app: App, provider: FakeProvider) -> None:
    """A page that cuts a text in two leaves it, and its conversation would fail from then on."""
    prompt = provider.plays(tokens("x", usage=None), prompt="cut \ufffd here 7c41")
    call = {"id": "\udc00", "type": "function", "function": {"name": "f", "arguments": '{"x": "\ude00\ud83d"}'}}
    messages = [
        {"role": "system", "content": "whole \U0001f600, \\ud83d, \\\ude00"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "\udc00", "content": "\ud83dx"},
        *user("cut \ud83d here 7c41"),
    ]
    response = await app.post({"model": MODEL, "messages": messages, "stop": ["\ud83d"]}, path=PATH)
    assert response.status_code == 200, response.text
    sent = provider.asked(prompt)[0].json
    assert [m["content"] for m in sent["messages"]] == ["whole 😀, \\ud83d, \\\ufffd", None, "\ufffdx", prompt]
    (sent_call,) = sent["messages"][1]["tool_calls"]
    assert (sent_call["id"], sent["messages"][2]["tool_call_id"]) == ("\ufffd", "\ufffd")
    assert sent_call["function"]["arguments"] == '{"x": "\ufffd\ufffd"}'
    assert sent["stop"] == ["\ufffd"]


@given(st.text(st.characters() | st.sampled_from("\\u\ud83d\ude00"), min_size=1, max_size=12))
async def test_any_text_of_a_script_is_read(text: str) -> None:
    """JavaScript's strings may have halves anywhere, and `JSON.stringify` writes them as escapes."""
    body = json.dumps({"messages": user(text), "model": MODEL})
    request = read_completion_request(body.encode(), False)
    expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert json.loads(request.payload)["messages"][0]["content"] == expected


SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "é" * 50, "schema": {"enum": [f"value {n}" for n in range(2_000)], "maximum": 10**25}},
}
PRICED: dict[str, Any] = {
    "response_format": SCHEMA,
    "stop": ["é" * 500, "\n"],
    "reasoning_effort": "very " * 1_000,
}


@pytest.mark.parametrize("fields", [{name: PRICED[name]} for name in PRICED] + [PRICED], ids=[*PRICED, "all"])
async def test_every_forwarded_field_is_priced(app: App, provider: FakeProvider, fields: dict[str, Any]) -> None:
    """Otherwise, a schema of 25,000 tokens would cost more than its reservation, and exceed the cap."""
    prompt = provider.plays(tokens("x", usage=None))
    numbers = {"temperature": 0.123456789, "seed": 2**62, "top_p": 0.5, "presence_penalty": 1.5}
    body = {"model": MODEL, "messages": user(prompt), "max_tokens": 10, **fields, **numbers}
    assert (await app.post(body, path=PATH)).status_code == 200
    assert {name: provider.asked(prompt)[0].json[name] for name in fields} == fields
    expected = max_cost(prompt + "x" * sum(json_bytes(value) for value in fields.values()), 10)
    assert await app.account.settled() == expected


SECRET = "my confession"
ECHOING: dict[str, tuple[str, Any]] = {
    "a role": ("/chat/completions", {"model": MODEL, "messages": [{"role": SECRET, "content": "x"}]}),
    "a role that looks like a message": (
        "/chat/completions",
        {"model": MODEL, "messages": [{"role": f"x' - at `$.{SECRET}` - at ", "content": "x"}]},
    ),
    "a type": ("/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": [{"type": SECRET}]}]}),
    "a model": ("/chat/completions", {"model": SECRET, "messages": user("x")}),
    "a modality": ("/chat/completions", {"model": MODEL, "messages": user("x"), "modalities": [SECRET]}),
    "a field that looks like a path": ("", {"prompt": "x", f"a - at `$.{SECRET}`": 1}),
    "a length": ("", {"prompt": "x", "maxTokens": SECRET}),
}


@pytest.mark.parametrize("case", ECHOING)
async def test_a_refusal_repeats_nothing_of_the_request(app: App, case: str) -> None:
    """It does not even repeat a wrong role, but names the right ones."""
    path, body = ECHOING[case]
    response = await app.post(body, path=path)
    assert response.status_code in (400, 422)
    assert SECRET not in response.text
    if "role" in case:
        choices = "assistant, developer, system, tool, user"
        assert response.json()["error"]["message"] == f"messages[0].role: must be one of {choices}."


MALFORMED: dict[str, dict[str, Any]] = {
    "functions": {"functions": [{"name": "f"}]},
    "a call of a function": {"function_call": "auto"},
    "two choices": {"n": 2},
    "logprobs": {"logprobs": True},
    "no messages": {"messages": []},
    "a message without a role": {"messages": [{"content": "hello"}]},
    "a question of null": {"messages": user(None)},
    "an assistant who said nothing": {"messages": [{"role": "assistant"}]},
    "no length": {"max_tokens": 0},
    "a huge seed": {"seed": 2**63},
    "stream of another type": {"stream": "yes"},
}
TEXT_PART = {"type": "text", "text": "What is this?"}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "image": {"messages": user([TEXT_PART, {"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}])},
    "audio": {"messages": user([{"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}])},
    "thinking of a user": {"messages": user([{"type": "thinking", "thinking": "y"}])},
    "spoken answers": {"modalities": ["text", "audio"]},
}


@pytest.mark.parametrize("case", [*MALFORMED, *MULTIMODAL])
async def test_refused(app: App, case: str) -> None:
    response = await app.post({"messages": user("Hello"), **(MALFORMED | MULTIMODAL)[case]}, path=PATH)
    if case in MALFORMED:
        refused(response, 400, "REQUEST_MALFORMED")
    else:
        refused(response, 422, "MULTIMODAL_UNSUPPORTED")
    assert (await app.account.spend())["reserved"] == 0


async def test_the_modality_text_is_accepted(app: App) -> None:
    body = {"model": MODEL, "messages": user("Hello"), "modalities": ["text"]}
    assert (await app.post(body, path=PATH)).status_code == 200


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_the_assistants_reasoning_is_sent_on_and_priced_once(app: App, provider: FakeProvider, name: str) -> None:
    """Some providers read the one name, some the other; none reads both."""
    prompt = provider.plays(tokens("x", usage=None))
    thoughts = "Größer als 3? ☀"
    said = {"role": "assistant", "content": "No", name: thoughts}
    body = {"model": MODEL, "messages": [*user("Why?"), said, *user(prompt)], "max_tokens": 10}
    assert (await app.post(body, path=PATH)).status_code == 200
    sent = provider.asked(prompt)[0].json["messages"][1]
    assert sent == said | {"reasoning": thoughts, "reasoning_content": thoughts}
    assert await app.account.settled() == max_cost("Why?No" + thoughts + prompt, 10, messages=3)


async def test_parts_that_clients_send_back(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x"))
    parts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "output_text", "text": "No.", "annotations": []},
        {"type": "refusal", "refusal": "I won't."},
    ]
    messages = [
        *user("Why?"),
        {"role": "assistant", "content": parts, "refusal": None, "audio": None, "reasoning": None},
        {"role": "assistant", "content": None, "refusal": "Never."},
        *user(prompt),
    ]
    assert (await app.post({"model": MODEL, "messages": messages}, path=PATH)).status_code == 200
    assert provider.asked(prompt)[0].json["messages"][1:3] == [
        {"role": "assistant", "content": "No.\nI won't.", "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Never."},
    ]


async def test_whole_numbers_may_be_written_with_a_fraction_of_zero(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x"))
    fields = {"max_tokens": 100.0, "max_completion_tokens": 1e2, "seed": 7.0, "n": 1.0}
    body = {"model": MODEL, "messages": user(prompt), "response_format": {"x": 1.0}, **fields}
    assert (await app.post(body, path=PATH)).status_code == 200
    sent = provider.asked(prompt)[0]
    assert (sent.json["max_tokens"], sent.json["seed"], sent.json["response_format"]) == (100, 7, {"x": 1.0})
    assert b'"max_tokens":100,' in sent.body
    refused(await app.post(body | {"max_tokens": 0.0}, path=PATH), 400, "REQUEST_MALFORMED")
    response = await app.post(body | {"max_tokens": 1.5}, path=PATH)
    refused(response, 400, "REQUEST_MALFORMED")
    assert response.json()["error"]["message"].startswith("max_tokens: must be a whole number")
