"""Native bodies that are refused, and bodies at the limits that are accepted."""

import json
import secrets
from typing import Any

import pytest

from gateway.errors import MultimodalUnsupported, RequestMalformed
from gateway.inference.formats import native
from gateway.inference.formats.completion import FullAnswer
from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.gateway.inference.formats.bodies import read_payload, refusal_of
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.prices import max_cost
from tests.support.responses import answered, refused

session = pytest.mark.asyncio(loop_scope="session")

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"prompt=hello",
    "null": b"null",
    "no prompt": b"{}",
    "empty prompt": b'{"prompt":""}',
    "unknown field": b'{"prompt":"x","temperature":0.5}',
    "a field that looks like a path": b'{"prompt":"x","a - at `$.cormorant`":1}',
    "one token too many": b'{"prompt":"x","maxTokens":2001.0}',
    "very many tokens": b'{"prompt":"x","maxTokens":1' + b"0" * 400 + b"}",
    "tokens as text": b'{"prompt":"x","maxTokens":"cormorant"}',
    "NaN": b'{"prompt":"x","maxTokens":NaN}',
    "an unknown effort": b'{"prompt":"x","reasoningEffort":"none"}',
    "surrogate as bytes": b'{"prompt":"\xed\xa0\x80"}',
    "not UTF-8": b'{"prompt":"\xff\xfe"}',
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "image field": {"prompt": "x", "image": "data:image/png;base64,AAAA"},
    "file field": {"prompt": "x", "file": "report.pdf"},
    "image part beside text": {"prompt": [{"type": "text", "text": "What is this?"}, IMAGE]},
}


@pytest.mark.parametrize("case", [*MALFORMED, *MULTIMODAL])
def test_refused_bodies(case: str) -> None:
    refusal = refusal_of(native, MALFORMED[case] if case in MALFORMED else MULTIMODAL[case])
    assert type(refusal) is (RequestMalformed if case in MALFORMED else MultimodalUnsupported)
    assert "cormorant" not in refusal.message


@pytest.mark.parametrize(
    ("text", "is_half"),
    [
        *((text, True) for text in ("a\ud800b", "\ude00\ud83d", "\\\ud83d", "\U0001f600\ud83d")),
        *((text, False) for text in ("\U0001f600", "\\ud83d", "\\ude00\\ud83d", "é☀👩‍🚀\u0000\u2028")),
    ],
)
def test_half_of_a_surrogate_pair_is_named(text: str, is_half: bool) -> None:
    """The body is JSON in UTF-8, so a hint at its encoding would mislead. Whole pairs and escapes as text are sent."""
    refusal = refusal_of(native, {"prompt": text, "other": 1})
    assert refusal is not None
    assert refusal.message.startswith("The body contains half of a surrogate pair") == is_half
    if not is_half:
        payload, text_bytes = read_payload(native, {"prompt": text})
        assert payload["messages"] == [{"role": "user", "content": text}]
        assert text_bytes == len(text.encode())


def test_of_duplicate_keys_the_last_is_sent_and_priced() -> None:
    payload, text_bytes = read_payload(native, b'{"prompt":"first","prompt":"last","maxTokens":2000,"maxTokens":1.0}')
    assert (payload["messages"][0]["content"], text_bytes) == ("last", 4)
    assert json.dumps(payload["max_tokens"]) == "1"


def test_the_effort_of_thinking_is_free() -> None:
    efforts = [read_payload(native, {"prompt": "x", **more}) for more in ({}, {"reasoningEffort": "low"})]
    assert efforts[1] == (efforts[0][0] | {"reasoning_effort": "low"}, efforts[0][1])


@pytest.mark.parametrize("finish", ["length", "content_filter", "tool_calls"])
def test_finish_reasons(finish: str) -> None:
    whole = native.NATIVE.full(FullAnswer("", "", []), "m", finish, None)
    last = native.NATIVE.end("m", finish, None).partition(b"data: ")[2]
    named = [json.loads(encoded)["finishReason"] for encoded in (whole, last)]
    assert named == [finish if finish != "tool_calls" else "stop"] * 2


TYPES = {
    "MULTIMODAL_UNSUPPORTED": ("image/svg+xml", "Multipart/Mixed; boundary=x", "application/octet-stream"),
    "REQUEST_MALFORMED": ("text/plain", "json"),
    "": ("application/json", "Application/JSON;charset=UTF-8"),
}


@session
@pytest.mark.parametrize("code", TYPES)
async def test_types_and_encodings(app: App, code: str) -> None:
    for kind in TYPES[code]:
        response = await app.post(content=b'{"prompt":"x"}', headers=app.headers(**{"Content-Type": kind}))
        if code:
            refused(response, 422 if "MULTI" in code else 400, code)
        else:
            assert response.status_code == 200
            headers = app.headers(**{"Content-Type": kind, "Content-Encoding": "gzip"})
            refused(await app.post(content=b'{"prompt":"x"}', headers=headers), 400, "REQUEST_MALFORMED")
    assert (await app.account.spend())["reserved"] == 0


@session
async def test_a_name_that_is_no_models_may_be_a_prompt_and_is_kept_nowhere(app: App) -> None:
    prompt = secrets.token_hex(12)
    app.gateway.confidential.add(prompt)
    response = await app.ask("x", model=prompt)
    refused(response, 400, "MODEL_NOT_ALLOWED")
    row = await app.logged(response.headers["X-Request-Id"])
    assert (row["code"], row["model"]) == ("MODEL_NOT_ALLOWED", "")
    with app.gateway.redis.client() as client:
        assert prompt.encode() not in b"".join(client.zrange(key, 0, -1)[-1] for key in client.keys("*:request-log:*"))
        assert not [key for key in client.keys("*:usage:*") if prompt.encode() in b"".join(client.hkeys(key))]


@session
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
