"""How the provider's bytes become choices, whatever way the network cuts them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ServiceError
from gateway.inference.availability import Seen
from gateway.inference.prices import Usage
from gateway.inference.provider import EVENT_LIMIT, Connection, Provider, Stream, classify, error_status
from gateway.settings import Settings

PROVIDER = Provider(Settings())


class NoTransport:
    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return False


def answer(body: bytes, status: int = 200) -> bytes:
    return (
        b"HTTP/1.1 %d x\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    ) + body


async def relay(parts: list[bytes], *, lost: bool = False) -> tuple[str, Stream, ServiceError | None]:
    connection = Connection(PROVIDER)
    connection.connection_made(NoTransport())  # type: ignore[arg-type]
    stream = connection.post(b"{}")
    text = ""
    try:
        for part in parts:
            connection.data_received(part)
            if stream._raw and stream.status == 200:
                text += "".join(choice.delta.content or "" for choice in stream._parse())
        if lost:
            connection.connection_lost(None)
        while (choices := await stream.read()) is not None:
            text += "".join(choice.delta.content or "" for choice in choices)
    except ServiceError as error:
        return text, stream, error
    finally:
        stream.close()
    return text, stream, None


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text: str | None, finish: str | None = None) -> bytes:
    return event(model="m", choices=[{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


@given(st.data(), st.lists(st.text(max_size=20), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
@settings(max_examples=200, deadline=None)
async def test_any_cut_gives_the_same_text(data: st.DataObject, texts: list[str], newline: bytes) -> None:
    body = b": hello\n\n" + b"".join(token(t) for t in texts)
    body += b"event: ping\nid: 7\nretry: 5\n\n" + token(None, "length")
    body += event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4}) + b"data: [DONE]\n\n"
    wire = answer(body.replace(b"\n", newline))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    parts = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True) if a != b]
    text, stream, error = await relay(parts)
    assert error is None
    assert text == "".join(texts)
    assert (stream.finish, stream.usage, stream.seen) == ("length", Usage(3, 4), Seen.COMPLETION)


async def test_an_event_of_several_data_lines() -> None:
    body = b'data: {"choices":[{"delta":\ndata:{"content":"a"}}]}\n\n' + token(None, "stop")
    assert (await relay([answer(body)]))[0] == "a"


async def test_the_last_usage_counts_and_nonsense_is_none() -> None:
    async def usage(*reports: object) -> Usage | None:
        body = b"".join(event(choices=[], usage=report) for report in reports) + b"data: [DONE]\n\n"
        return (await relay([answer(body)]))[1].usage

    good = {"prompt_tokens": 1, "completion_tokens": 2}
    assert await usage(good, None) == Usage(1, 2)
    assert await usage(good, {"prompt_tokens": 5, "completion_tokens": 6}) == Usage(5, 6)
    for bad in (
        {"prompt_tokens": -1, "completion_tokens": 2},
        {"prompt_tokens": 1.5, "completion_tokens": 2},
        {},
        "x",
        7,
    ):
        assert await usage(good, bad) is None
    assert await usage({"prompt_tokens": True, "completion_tokens": 2}) is None


async def test_an_answer_without_an_end_is_cut() -> None:
    text, _, error = await relay([answer(token("a"))])
    assert (text, type(error)) == ("a", ProviderFailed)


async def test_a_close_before_the_promised_end_is_cut() -> None:
    _, stream, error = await relay([answer(token("a") + token(None, "stop"))[:-4]], lost=True)
    assert isinstance(error, ProviderFailed)
    assert stream.seen == Seen.FAILED


async def test_an_unframed_answer_ends_with_the_connection() -> None:
    wire = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + token("a", "stop")
    assert (await relay([wire], lost=True))[0::2] == ("a", None)


async def test_done_before_the_close_is_complete() -> None:
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    body = token("a") + b"data: [DONE]\n\n"
    assert (await relay([wire + b"%x\r\n" % len(body) + body + b"\r\n"], lost=True))[0::2] == ("a", None)


@pytest.mark.parametrize(
    "body",
    [
        b"data: {]\n\n",
        b"data: [1]\n\n",
        b"<html>\n\n",
        b"",
        b'data: {"choices":"x"}\n\n',
        b"data: \xff\xfe\n\n",
        b'{"choices":[{"message":{"content":"x"}}]}',
        b"data: " + b"[" * 200_000 + b"\n\n",
        b"data: " + b'"' + b"x" * EVENT_LIMIT + b'"\n\n',
        b"x" * (EVENT_LIMIT + 1),
    ],
)
async def test_garbage(body: bytes) -> None:
    assert isinstance((await relay([answer(body)]))[2], ProviderFailed)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"error": {"message": "x", "code": 500}}, Seen.FAILED),
        ({"error": "x"}, Seen.FAILED),
        ({"object": "error", "message": "x", "code": 503}, Seen.FAILED),
        ({"message": "x", "status": "429"}, Seen.REACHED),
        ({"error": {"message": "quota exceeded", "code": 429}}, Seen.QUOTA),
        ({"error": {"code": 402}}, Seen.QUOTA),
    ],
)
async def test_errors_inside_the_stream(error: dict[str, object], expected: Seen) -> None:
    text, stream, raised = await relay([answer(token("a") + event(**error) + token("b") + b"data: [DONE]\n\n")])
    assert text == "a"
    assert isinstance(raised, ProviderQuotaExhausted if expected is not Seen.FAILED else ProviderFailed)
    assert stream.seen == expected


@pytest.mark.parametrize(
    ("status", "body", "kind", "seen"),
    [
        (402, b"", ProviderQuotaExhausted, Seen.QUOTA),
        (429, b'{"error":{"code":"insufficient_quota"}}', ProviderQuotaExhausted, Seen.QUOTA),
        (429, b"slow down", ProviderQuotaExhausted, Seen.REACHED),
        (401, b"", ProviderFailed, None),
        (403, b"", ProviderFailed, None),
        (400, b"", ProviderFailed, Seen.REACHED),
        (302, b"", ProviderFailed, Seen.REACHED),
        (500, b"", ProviderFailed, Seen.FAILED),
    ],
)
async def test_statuses(status: int, body: bytes, kind: type[ServiceError], seen: Seen | None) -> None:
    error, shown = classify(status, body)
    assert (type(error), shown) == (kind, seen)
    assert type((await relay([answer(body, status)]))[2]) is kind


def test_error_status_reads_only_statuses() -> None:
    assert error_status(b'{"error":{"code":"rate_limited"}}') == 500
    assert error_status(b'{"error":{"code":200}}') == 500
    assert error_status(b"nonsense") == 500
