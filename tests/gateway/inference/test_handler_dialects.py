"""The table of dialects at each door, streamed and whole: the same text, the same end, the same money."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.fakes import FakeProvider
from tests.gateway.inference.provider.dialect_table import BROKE, CUT, TABLE, split
from tests.support.accounts import App
from tests.support.polling import wait_until
from tests.support.prices import cost, max_cost

pytestmark = pytest.mark.asyncio(loop_scope="session")

Outcome = tuple[str, str]  # the text, and the finish reason or the error's code


async def ask(app: App, prompt: str, door: str, stream: bool) -> Outcome:
    path, body, read_stream, read_whole = DOORS[door]
    response = await app.post({**body(prompt), "stream": stream}, path=path)
    if response.headers["content-type"].startswith("text/event-stream"):
        return read_stream(response.text)
    answer = response.json()
    return ("", answer["error"]["code"]) if answer.get("error") else read_whole(answer)


def read_native(stream: str) -> Outcome:
    text, end = "", ""
    for event in stream.removesuffix("\n\n").split("\n\n"):
        content = json.loads(event.partition("data: ")[2])
        text += content.get("token", "")
        end = content["error"]["code"] if "error" in content else content.get("finishReason", end)
    return text, end


def read_openai(stream: str) -> Outcome:
    text, end = "", ""
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line]
    for line in lines:
        content: dict[str, Any] = {} if line == "[DONE]" else json.loads(line)
        if "error" in content:
            assert "[DONE]" not in lines
            end = content["error"]["code"]
        for choice in content.get("choices", ()):
            text += choice["delta"].get("content") or choice["delta"].get("refusal") or ""
            end = choice["finish_reason"] or end
    return text, end


def read_responses(stream: str) -> Outcome:
    text, events = "", [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    for each in events:
        if each["type"] in ("response.output_text.delta", "response.refusal.delta"):
            text += each["delta"]
    last = events[-1]["response"]
    if last["error"]:
        return text, last["error"]["code"]
    assert (text, last["status"]) == (read_output(last)[0], events[-1]["type"].removeprefix("response."))
    return text, read_output(last)[1]


def read_output(response: dict[str, Any]) -> Outcome:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    text = "".join(part.get("text") or part.get("refusal", "") for part in parts)
    reason = (response["incomplete_details"] or {}).get("reason")
    called = any(item["type"] == "function_call" for item in response["output"])
    return text, {"max_output_tokens": "length"}.get(reason, reason) or ("tool_calls" if called else "stop")


def read_message(answer: dict[str, Any]) -> Outcome:
    choice = answer["choices"][0]
    return choice["message"]["content"] or choice["message"].get("refusal", ""), choice["finish_reason"]


class Door(NamedTuple):
    path: str
    body: Callable[[str], dict[str, Any]]
    read_stream: Callable[[str], Outcome]
    read_whole: Callable[[dict[str, Any]], Outcome]


DOORS = {
    "native": Door("", lambda prompt: {"prompt": prompt}, read_native, lambda a: (a["text"], a["finishReason"])),
    "openai": Door(
        "/chat/completions",
        lambda prompt: {"messages": [{"role": "user", "content": prompt}]},
        read_openai,
        read_message,
    ),
    "responses": Door("/responses", lambda prompt: {"input": prompt}, read_responses, read_output),
}


# What a door does with an answer depends on its kind alone. `test_dialects.py` reads the whole table.
AT_EACH_DOOR = (
    *("plain", "a refusal", "half tokens"),
    *("done without a finish reason", "finish length", "finish content_filter", "finish abort"),
    "finish tool_use after a call",
)


async def assert_answered(app: App, provider: FakeProvider, name: str, door: str, stream: bool) -> int:
    """Asks for an answer of the table, and returns its price."""
    sent, text, finish, reported = TABLE[name]
    if door == "native":
        finish = {"tool_calls": "stop"}.get(finish, finish)
        finish = "content_filter" if "a refusal" in name else finish
    failed = finish in (BROKE, CUT)
    expected = (text if stream or not failed else "", "PROVIDER_ERROR" if failed else finish)
    prompt = provider.plays(split(sent, "events"))
    assert await ask(app, prompt, door, stream) == expected, name
    if reported is not None:
        return cost(*reported)
    return max_cost(prompt) if text or not failed else 0


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", AT_EACH_DOOR)
async def test_what_providers_send(app: App, provider: FakeProvider, name: str, door: str, stream: bool) -> None:
    spent = await assert_answered(app, provider, name, door, stream)
    assert await app.account.settled() == spent


async def test_the_books_agree(app: App, provider: FakeProvider) -> None:
    """The answers, and the spend, the rows and the usage of all of them, to the nano-euro."""
    spent = 0
    for number, name in enumerate([*TABLE][::6]):
        spent += await assert_answered(app, provider, name, [*DOORS][number % 3], number % 2 == 0)
        assert await app.account.settled() == spent, name

    async def recorded() -> tuple[int, int]:
        rows = (await app.account.get("/account/requests")).json()
        usage = (await app.account.get("/account/usage?by=hour&group=none")).json()["rows"]
        return sum(row["nanoEuro"] for row in rows), sum(row["nanoEuro"] for row in usage)

    await wait_until(recorded, holds=lambda found: found == (spent, spent))
    assert spent > 0
