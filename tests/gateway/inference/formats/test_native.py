"""Native bodies that are refused, and bodies at the limits that are accepted."""

import json
import secrets
from typing import Any

import pytest

from tests.fakes import FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.prices import max_cost
from tests.support.responses import answered, ended, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"prompt=hello",
    "null": b"null",
    "no prompt": b"{}",
    "empty prompt": b'{"prompt":""}',
    "prompt is a list of texts": b'{"prompt":["x","y"]}',
    "unknown field": b'{"prompt":"x","temperature":0.5}',
    "model is null": b'{"prompt":"x","model":5}',
    "no tokens": b'{"prompt":"x","maxTokens":0}',
    "one token too many": b'{"prompt":"x","maxTokens":2001}',
    "very many tokens": b'{"prompt":"x","maxTokens":1' + b"0" * 400 + b"}",
    "tokens as text": b'{"prompt":"x","maxTokens":"5"}',
    "NaN": b'{"prompt":"x","maxTokens":NaN}',
    "an unknown effort": b'{"prompt":"x","reasoningEffort":"none"}',
    "lone high surrogate": b'{"prompt":"a\\ud800b"}',
    "surrogate as bytes": b'{"prompt":"\xed\xa0\x80"}',
    "not UTF-8": b'{"prompt":"\xff\xfe"}',
    "UTF-16": '{"prompt":"x"}'.encode("utf-16"),
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
    "deep field": b'{"prompt":"x","x":' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}",
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_malformed(app: App, case: str) -> None:
    response = await app.post(content=MALFORMED[case], headers=app.headers(**{"Content-Type": "application/json"}))
    refused(response, 400, "REQUEST_MALFORMED")
    assert (await app.account.spend())["reserved"] == 0


@pytest.mark.parametrize("text", ["\ude00\ud83d", "\\\ud83d", "\U0001f600\ud83d"])
async def test_half_of_a_surrogate_pair_is_named(app: App, text: str) -> None:
    """The body is JSON in UTF-8, so a hint at its encoding would mislead."""
    error = refused(await app.post({"prompt": text}), 400, "REQUEST_MALFORMED")
    assert error["message"].startswith("The body contains half of a surrogate pair")


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud83d", "\\ude00\\ud83d"])
async def test_whole_pairs_and_their_escapes_as_text_are_sent(app: App, provider: FakeProvider, text: str) -> None:
    prompt = provider.plays(tokens("x"), prompt=text + " 3f1c")
    answered(await app.post({"prompt": prompt}))
    assert provider.asked(prompt)[0].json["messages"][0]["content"] == prompt
    error = refused(await app.post({"prompt": prompt, "other": 1}), 400, "REQUEST_MALFORMED")
    assert "surrogate" not in error["message"]


@pytest.mark.parametrize("model", ["", "GPT-OSS-120B", "gpt-oss-120b\n"])
async def test_models_outside_the_list(app: App, model: str) -> None:
    response = await app.ask("x", model=model)
    refused(response, 400, "MODEL_NOT_ALLOWED")
    row = await app.logged(response.headers["X-Request-Id"])
    assert (row["code"], row["model"]) == ("MODEL_NOT_ALLOWED", "")


async def test_a_name_that_is_no_models_may_be_a_prompt_and_is_kept_nowhere(app: App) -> None:
    prompt = secrets.token_hex(12)
    app.gateway.confidential.add(prompt)
    response = await app.ask("x", model=prompt)
    refused(response, 400, "MODEL_NOT_ALLOWED")
    await app.logged(response.headers["X-Request-Id"])
    with app.gateway.redis.client() as client:
        assert prompt.encode() not in b"".join(client.zrange(key, 0, -1)[-1] for key in client.keys("*:request-log:*"))
        assert not [key for key in client.keys("*:usage:*") if prompt.encode() in b"".join(client.hkeys(key))]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def test_a_length_with_a_fraction_of_zero(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(tokens("x"))
    answered(await app.ask(prompt, maxTokens=100.0))
    assert b'"max_tokens":100,' in provider.asked(prompt)[0].body
    refused(await app.ask(prompt, maxTokens=2001.0), 400, "REQUEST_MALFORMED")


async def test_the_effort_of_thinking(app: App, provider: FakeProvider) -> None:
    """It is free: without usage, an answer costs its bound."""
    prompt = provider.plays(tokens("x", usage=None))
    answered(await app.ask(prompt, reasoningEffort="low"))
    assert provider.asked(prompt)[0].json["reasoning_effort"] == "low"
    assert await app.account.settled() == max_cost(prompt)
    answered(await app.ask(prompt))
    assert "reasoning_effort" not in provider.asked(prompt)[1].json


async def test_thinking_may_take_the_whole_answer(app: App, provider: FakeProvider) -> None:
    prompt = provider.plays(ROLE, chunk(reasoning_content="hm"), chunk(finish="length"), chunk(usage=(5, 200)), DONE)
    found = answered(await app.ask(prompt, maxTokens=200))
    usage = {"inputTokens": 5, "outputTokens": 200}
    assert (found["text"], found["finishReason"], found["usage"]) == ("", "length", usage)
    events = await app.events(prompt, maxTokens=200)
    assert (len(events), ended(events)["finishReason"]) == (1, "length")


MULTIMODAL: dict[str, dict[str, Any]] = {
    "image field": {"prompt": "x", "image": "data:image/png;base64,AAAA"},
    "image field of another name": {"prompt": "x", "image_base64": "AAAA"},
    "file field": {"prompt": "x", "file": "report.pdf"},
    "image part beside text": {"prompt": [{"type": "text", "text": "What is this?"}, IMAGE]},
}


@pytest.mark.parametrize("case", MULTIMODAL)
async def test_multimodal_bodies(app: App, case: str) -> None:
    refused(await app.post(MULTIMODAL[case]), 422, "MULTIMODAL_UNSUPPORTED")


TYPES = {
    422: (
        *("image/png", "image/svg+xml", "audio/mpeg", "video/mp4", "application/pdf", "application/octet-stream"),
        *("multipart/form-data; boundary=x", "Multipart/Mixed; boundary=x"),
    ),
    400: ("text/plain", "application/x-www-form-urlencoded", "text/html", "json", "x/y"),
    200: ("application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"),
}


@pytest.mark.parametrize(("status", "kind"), [(status, kind) for status, kinds in TYPES.items() for kind in kinds])
async def test_types(app: App, status: int, kind: str) -> None:
    headers = app.headers(**{"Content-Type": kind})
    for path, body in (("", b'{"prompt":"x"}'), ("/chat/completions", b'{"messages":[{"role":"user","content":"x"}]}')):
        response = await app.post(content=body, path=path, headers=headers)
        if status != 200:
            refused(response, status, {422: "MULTIMODAL_UNSUPPORTED", 400: "REQUEST_MALFORMED"}[status])
        else:
            assert response.status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "x-cormorant"])
async def test_encoded_bodies(app: App, encoding: str) -> None:
    headers = app.headers(**{"Content-Type": "application/json", "Content-Encoding": encoding})
    refused(await app.post(content=b'{"prompt":"x"}', headers=headers), 400, "REQUEST_MALFORMED")


async def test_exactly_one_hundred_kilobytes(gw: Gateway, app: App, provider: FakeProvider) -> None:
    frame = json.dumps({"prompt": ""}).encode()
    prompt = provider.plays(tokens("x", usage=None), prompt="k" * (102_400 - len(frame)))
    body = frame.replace(b'""', b'"%b"' % prompt.encode())
    headers = app.headers(**{"Content-Type": "application/json"})
    assert len(body) == 102_400
    answered(await app.post(content=body, headers=headers))
    assert await app.account.settled() == max_cost(prompt)
    refused(await app.post(content=body + b" ", headers=headers), 413, "REQUEST_TOO_LARGE")
    assert len(provider.asked(prompt)) == 1

    async def without_length(data: bytes) -> Any:
        for start in range(0, len(data), 10_000):
            yield data[start : start + 10_000]

    answered(await app.post(content=without_length(body), headers=headers))
    refused(await app.post(content=without_length(body + b" "), headers=headers), 413, "REQUEST_TOO_LARGE")


async def test_escapes_are_priced_by_their_text(app: App, provider: FakeProvider) -> None:
    text = "é☀👩‍🚀\u0000\u2028" + "7d21"
    prompt = provider.plays(tokens("x", usage=None), prompt=text)
    answered(await app.post({"prompt": prompt, "maxTokens": 1}))
    assert provider.asked(prompt)[0].json["messages"][0]["content"] == text
    assert await app.account.settled() == max_cost(text, 1)


async def test_of_duplicate_keys_the_last_is_sent_and_priced(app: App, provider: FakeProvider) -> None:
    for text in ("first 91ab", "second 91ab"):
        provider.plays(tokens("x", usage=None), prompt=text)
    body = b'{"prompt":"first 91ab","prompt":"second 91ab","maxTokens":2000,"maxTokens":1}'
    answered(await app.post(content=body, headers=app.headers(**{"Content-Type": "application/json"})))
    assert not provider.asked("first 91ab")
    assert provider.asked("second 91ab")[0].json["max_tokens"] == 1
    assert await app.account.settled() == max_cost("second 91ab", 1)
