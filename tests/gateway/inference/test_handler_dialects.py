"""The table of dialects at both doors, streamed and whole: the same text, the same end, the same money."""

import json
from typing import Any

import pytest

from tests.fakes import FakeProvider
from tests.gateway.inference.provider.dialect_table import BROKE, CUT, TABLE, split
from tests.support.accounts import App
from tests.support.polling import wait_until
from tests.support.prices import cost, max_cost

pytestmark = pytest.mark.asyncio(loop_scope="session")

Outcome = tuple[str, str]  # the text, and the finish reason or the error's code


async def ask(app: App, prompt: str, door: str, stream: bool) -> Outcome:
    if door == "native":
        response = await app.ask(prompt, stream=stream)
    else:
        body = {"model": "gpt-oss-120b", "stream": stream, "messages": [{"role": "user", "content": prompt}]}
        response = await app.post(body, path="/chat/completions")
    if response.headers["content-type"].startswith("text/event-stream"):
        return (read_native if door == "native" else read_openai)(response.text)
    body = response.json()
    if "error" in body:
        return "", body["error"]["code"]
    if door == "native":
        return body["text"], body["finishReason"]
    choice = body["choices"][0]
    return choice["message"]["content"] or choice["message"].get("refusal", ""), choice["finish_reason"]


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


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("door", ["native", "openai"])
@pytest.mark.parametrize("name", TABLE)
async def test_what_providers_send(app: App, provider: FakeProvider, name: str, door: str, stream: bool) -> None:
    sent, text, finish, reported = TABLE[name]
    if door == "native":
        finish = {"tool_calls": "stop"}.get(finish, finish)
        finish = "content_filter" if name in ("a refusal", "half a pair in a refusal") else finish
    failed = finish in (BROKE, CUT)
    expected = (text if stream or not failed else "", "PROVIDER_ERROR" if failed else finish)
    spent = 0
    for how in ("whole", "events"):
        prompt = provider.plays(split(sent, how))
        assert await ask(app, prompt, door, stream) == expected
        if reported is not None:
            spent += cost(*reported)
        elif text or not failed:
            spent += max_cost(prompt)
        assert await app.account.settled() == spent


async def test_the_books_agree(app: App, provider: FakeProvider) -> None:
    """The spend, the rows and the usage of all of it, to the nano-euro."""
    for number, (sent, _, _, _) in enumerate(TABLE.values()):
        prompt = provider.plays(split(sent, "events"))
        await ask(app, prompt, ("native", "openai")[number % 2], number % 3 == 0)
    spent = await app.account.settled()

    async def recorded() -> tuple[int, int]:
        rows = (await app.account.get("/account/requests")).json()
        usage = (await app.account.get("/account/usage?by=hour&group=none")).json()["rows"]
        return sum(row["nanoEuro"] for row in rows), sum(row["nanoEuro"] for row in usage)

    await wait_until(recorded, holds=lambda found: found == (spent, spent))
    assert spent > 0
