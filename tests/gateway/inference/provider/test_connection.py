"""A connection: the end of an HTTP message, its state after it, and how what arrives is passed on."""

import asyncio
import time
from email.utils import formatdate
from typing import NamedTuple

import pytest

from gateway.errors import ProviderFailed, ProviderQuotaExhausted, ProviderTimeout, ServiceError
from gateway.inference.formats.native import NATIVE
from gateway.inference.formats.responses import Responses
from gateway.inference.provider.connection import (
    ACTIVE,
    CLOSED,
    DRAIN_SECONDS,
    DRAINING,
    HIGH_WATER_BYTES,
    IDLE,
    IDLE_SECONDS,
    ClientGone,
    ProviderConnection,
    Stream,
)
from gateway.inference.provider.errors import ProviderSignal
from gateway.settings import ProviderTimeouts
from gateway.settings.prices import Usage
from tests.fakes import FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.server import CLOSE, Raw
from tests.gateway.inference.provider.events import DONE, event, token
from tests.support.accounts import App
from tests.support.responses import answered

session = pytest.mark.asyncio(loop_scope="session")

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Transport:
    """Records the connection's calls of its transport."""

    def __init__(self) -> None:
        self.written = b""
        self.reading, self.closing = True, False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing


class Pool:
    def __init__(self) -> None:
        self.kept: list[ProviderConnection] = []
        self.forgotten: list[ProviderConnection] = []

    def keep(self, connection: ProviderConnection) -> None:
        self.kept.append(connection)

    def forget(self, connection: ProviderConnection) -> None:
        self.forgotten.append(connection)


def connected() -> tuple[ProviderConnection, Transport, Pool]:
    transport, pool = Transport(), Pool()
    connection = ProviderConnection(pool)
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, transport, pool


class Asked(NamedTuple):
    connection: ProviderConnection
    transport: Transport
    pool: Pool
    stream: Stream


def asked(*received: bytes) -> Asked:
    """Sends a request on a new connection, which receives these parts of an answer."""
    connection, transport, pool = connected()
    stream = connection.post(b"", b"{}")
    for part in received:
        connection.data_received(part)
    return Asked(connection, transport, pool, stream)


def sized(body: bytes, status: int = 200) -> bytes:
    head = b"HTTP/1.1 %d x\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


def piece(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def relay(parts: list[bytes], *, lost: bool = False) -> tuple[str, Stream, ServiceError | None]:
    """Relays an answer that arrives in these parts, and returns its text."""
    connection, _, _, stream = asked()
    text = ""
    try:
        for part in parts:
            connection.data_received(part)
            if stream.answer.unread and stream.status == 200:
                text += "".join(delta.content or "" for delta in stream.answer.read())
        if lost:
            connection.connection_lost(None)
        while (deltas := await stream.read()) is not None:
            text += "".join(delta.content or "" for delta in deltas)
    except ServiceError as error:
        return text, stream, error
    finally:
        stream.close()
    return text, stream, None


BODY = token("a") + token("b", "stop") + event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4}) + DONE


WIRE = CHUNKED + piece(BODY) + END
# Ways to send one message; without a length it ends with the connection.
WHOLE = {
    "sized": sized(BODY),
    "chunked": WIRE,
    "chunk extensions": CHUNKED + b"%x;name=value\r\n%b\r\n" % (len(BODY), BODY) + END,
    "trailers": WIRE.replace(END, b"0\r\nX-Checksum: 1\r\n\r\n"),
    "continue first": b"HTTP/1.1 100 Continue\r\n\r\n" + WIRE,
    "closing": sized(BODY).replace(b"\r\n", b"\r\nconnection: close\r\n", 1),
    "unframed": b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("way", WHOLE)
async def test_any_cut_gives_the_same_answer(way: str) -> None:
    wire = WHOLE[way]
    in_two = [[wire[:cut], wire[cut:]] for cut in range(1, len(wire))]
    for parts in (*in_two, [wire[at : at + 1] for at in range(len(wire))]):
        text, stream, error = await relay(parts, lost=way in ("unframed", "HTTP/1.0"))
        assert (text, error, stream.answer.usage) == ("ab", None, Usage(3, 4)), parts
        assert (stream.answer.finish, stream.answer.signal) == ("stop", ProviderSignal.COMPLETION)


LAST = token("b", "stop")


@pytest.mark.parametrize("last", [LAST[:-2], LAST[:-1], LAST[:-2] + b"\r\n", LAST[:-2] + b"\r"])
async def test_a_last_event_without_its_blank_line(last: bytes) -> None:
    """Its token is relayed even if the end of the message arrives in a later read."""
    text, stream, error = await relay([CHUNKED + piece(token("a")) + piece(last), END])
    assert (text, error, stream.answer.complete) == ("ab", None, True)
    unframed = b"HTTP/1.1 200 OK\r\n\r\n" + token("a")
    assert (await relay([unframed, last], lost=True))[0::2] == ("ab", None)


async def test_a_close_before_the_declared_end_is_a_truncation() -> None:
    _, stream, error = await relay([sized(token("a") + token(None, "stop"))[:-4]], lost=True)
    assert isinstance(error, ProviderFailed)
    assert stream.answer.signal is ProviderSignal.FAILED


UNREADABLE = {
    "not HTTP": [b"\x16\x03\x01 nonsense\r\n\r\n"],
    "a head without an end": [b"HTTP/1.1 200 OK\r\nx-long: " + b"x" * 60_000, b"x" * 60_000],
    "a compressed body": [b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b"],
    "a bad status": [CHUNKED.replace(b"200", b"2x0") + piece(token("a") + DONE)],
    "a negative chunk": [CHUNKED + b"-5\r\nhello\r\n"],
    "an endless size of a chunk": [CHUNKED + b"f" * 100_000 + b"\r\n"],
    "no size of a chunk, after a token": [CHUNKED + piece(token("a")), b"nonsense\r\n"],
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_an_http_message_that_cannot_be_read(name: str) -> None:
    _, stream, error = await relay(UNREADABLE[name])
    assert (type(error), stream.answer.signal) == (ProviderFailed, ProviderSignal.FAILED)


@pytest.mark.parametrize("lost", [True, False])
async def test_an_error_status(lost: bool) -> None:
    _, stream, error = await relay([sized(b"", 401)], lost=lost)
    assert (type(error), stream.answer.signal) == (ProviderFailed, ProviderSignal.DENIED)


async def test_a_long_body_of_an_error_status_is_not_awaited() -> None:
    wire = b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n" + piece(b"x" * (HIGH_WATER_BYTES + 1))
    assert isinstance((await relay([wire]))[2], ProviderFailed)


async def test_a_connection_is_kept_after_a_whole_message() -> None:
    connection, transport, pool = connected()
    assert (connection.state, connection.is_usable()) == (IDLE, True)
    for _ in range(2):
        stream = connection.post(b"POST / HTTP/1.1\r\ncontent-length: ", b"{}")
        assert connection.state is ACTIVE
        connection.data_received(CHUNKED + piece(token("a") + DONE) + END)
        assert await stream.read()
        assert await stream.read() is None
        stream.close()
        assert connection.state is IDLE
    assert pool.kept == [connection] * 2
    assert transport.written == b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}" * 2


async def test_the_end_of_a_message_may_follow_its_answer() -> None:
    for end in ([END], [END[:2], END[2:]]):
        connection, _, pool, stream = asked(CHUNKED + piece(DONE))
        assert await stream.read() is None
        stream.close()
        assert connection.state is DRAINING
        assert pool.kept == []
        for part in end:
            connection.data_received(part)
        assert (connection.state, pool.kept) == (IDLE, [connection])


@pytest.mark.parametrize("tail", [END + CHUNKED, END + b"HTTP", b"garbage", piece(b"x") * 3 + END + b"x"])
async def test_a_second_answer_closes_the_connection(tail: bytes) -> None:
    connection, transport, pool, stream = asked(CHUNKED + piece(DONE))
    assert await stream.read() is None
    stream.close()
    connection.data_received(tail)
    assert (connection.state, transport.closing, pool.kept) == (CLOSED, True, [])

    connection, transport, pool, stream = asked(CHUNKED + piece(token("a")))
    assert await stream.read()
    connection.data_received(piece(DONE) + tail)
    stream.close()
    assert (connection.state, transport.closing, pool.kept) == (CLOSED, True, [])


async def test_data_on_an_idle_connection_closes_it() -> None:
    connection, transport, _ = connected()
    connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert (connection.state, transport.closing, connection.is_usable()) == (CLOSED, True, False)


async def test_leaving_an_answer_unfinished_closes_the_connection() -> None:
    connection, transport, pool, stream = asked(CHUNKED + piece(token("a")))
    stream.fail(ClientGone())
    with pytest.raises(ClientGone):
        await stream.read()
    stream.close()
    assert (connection.state, transport.closing, pool.kept) == (CLOSED, True, [])
    connection.connection_lost(None)
    assert pool.forgotten == [connection]


async def test_waiting_too_long_for_the_end_of_a_message_closes_a_connection() -> None:
    draining, transport, _ = connected()
    stream = draining.post(b"", b"{}")
    draining.tick(2 * IDLE_SECONDS)
    assert draining.state is ACTIVE
    draining.data_received(CHUNKED + piece(DONE))
    assert await stream.read() is None
    stream.close()
    draining.tick(DRAIN_SECONDS)
    assert (draining.state, transport.closing) == (CLOSED, True)


async def test_unread_bytes_pause_the_provider() -> None:
    _, transport, _, stream = asked(CHUNKED + piece(token("x" * HIGH_WATER_BYTES)), piece(token("y")))
    assert not transport.reading
    stream.tick(100, ProviderTimeouts(), 200)
    assert [delta.content for delta in await stream.read() or []] == ["x" * HIGH_WATER_BYTES, "y"]
    assert transport.reading


async def test_silence_and_age_time_out() -> None:
    limits = ProviderTimeouts(connect=1, first=3, idle=2, total=10)
    for received, passed in (((), 3), ((CHUNKED,), 2), ((CHUNKED + piece(token("a")),), 2)):
        *_, stream = asked(*received)
        stream.tick(passed - 0.5, limits, 60)
        assert stream.answer.failure is None
        stream.tick(0.5, limits, 60)
        assert (type(stream.answer.failure), stream.answer.signal) == (ProviderTimeout, ProviderSignal.FAILED)
    connection, _, _, stream = asked(CHUNKED)
    for _ in range(10):
        stream.tick(1, limits, 60)
        connection.data_received(piece(b": still thinking\n\n"))
        assert stream.answer.read() == []
    with pytest.raises(ProviderTimeout):
        await stream.read()
    assert stream.answer.signal is ProviderSignal.FAILED
    # A reader that slows the answer down is not the provider's failure.
    _, transport, _, stream = asked(CHUNKED + piece(token("x" * HIGH_WATER_BYTES)), piece(token("y")))
    assert not transport.reading
    stream.tick(10, limits, 60)
    assert (type(stream.answer.failure), stream.answer.signal) == (ProviderTimeout, None)


async def test_a_keep_alive_is_due_when_nothing_was_sent() -> None:
    *_, stream = asked()
    stream.tick(1, ProviderTimeouts(), 1)
    assert await stream.read() == []


async def test_forward_sends_data_that_arrives_while_the_relay_waits() -> None:
    connection, _, _, stream = asked()
    taken: list[bytes] = []
    accepts = True

    def forward(out: bytes) -> bool:
        taken.append(out)
        return accepts

    connection.data_received(CHUNKED + piece(token("a")))
    assert [delta.content for delta in await stream.read() or []] == ["a"]
    stream.format, stream.forward = NATIVE, forward
    waiting = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    connection.data_received(piece(token("b")))
    await asyncio.sleep(0)
    assert (taken, waiting.done()) == ([b'data: {"token":"b"}\n\n'], False)
    accepts = False
    connection.data_received(piece(token("c")))
    connection.data_received(piece(token("d")))
    assert (await waiting, stream.refused) == ([], b'data: {"token":"c"}\n\n'), "what it refuses waits for the relay"
    assert taken[1:] == [stream.refused], "nothing overtakes it"
    assert [delta.content for delta in await stream.read() or []] == ["d"]
    waiting = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    connection.data_received(piece(DONE))
    assert await waiting is None


async def test_what_is_refused_is_encoded_once_and_survives_a_cut() -> None:
    """Formats count what they encode."""
    connection, _, _, stream = asked(CHUNKED + piece(token("a")))
    encoder = Responses("req_1", "m", asked=b"{}")
    out = encoder.chunks(await stream.read() or [])
    stream.format, stream.forward = encoder, lambda _: False
    waiting = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    connection.data_received(piece(token("b")))
    connection.connection_lost(None)
    out += encoder.chunks(await waiting or []) + stream.refused + encoder.end("m", "stop", None)
    assert out.count(b'"delta":"b"') == 1
    assert b'"text":"ab"' in out


async def whole(connection: ProviderConnection, *parts: bytes) -> str:
    """Receives an answer after which the connection is kept, and returns its text."""
    stream = connection.post(b"", b"{}")
    for part in parts:
        connection.data_received(part)
    text = ""
    while (deltas := await stream.read()) is not None:
        text += "".join(delta.content or "" for delta in deltas)
    stream.close()
    return text


ANSWER = token("a", "stop") + DONE


async def test_nothing_of_an_answer_affects_the_next_on_its_connection() -> None:
    """Neither its `Retry-After`, nor the length of its head or of its body."""
    connection, _, pool = connected()
    begin = b"HTTP/1.1 200 OK\r\nretry-after: 7\r\nx-long: " + b"x" * 40_000
    for number in range(1, 4):
        assert await whole(connection, begin, b"\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER) == "a"
        assert len(pool.kept) == number
    stream = connection.post(b"", b"{}")
    connection.data_received(sized(b'{"error":{"code":"insufficient_quota"}}', 429))
    with pytest.raises(ProviderQuotaExhausted) as failed:
        await stream.read()
    assert (failed.value.retry_after, stream.answer.signal) == (None, ProviderSignal.QUOTA)
    stream.close()
    stream = connection.post(b"", b"{}")
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + token("b", "stop"))
    assert [delta.content for delta in await stream.read() or []] == ["b"]
    connection.connection_lost(None)
    assert await stream.read() is None
    stream.close()


RETRY_AFTERS = {
    "retry-after: 17": 17,
    "Retry-After: 16.5": 17,
    "retry-after-ms: 16500": 17,
    "retry-after: 99999999": 3600,
    "retry-after: {in_100_seconds}": 100,
    "retry-after: Wed, 21 Oct 2020 07:28:00 GMT": 5,  # a rate limit has a time of its own
    "retry-after: soon": 5,
    "retry-after: -5": 5,
}


@pytest.mark.parametrize("header", RETRY_AFTERS)
async def test_a_retry_after(header: str) -> None:
    sent = header.format(in_100_seconds=formatdate(time.time() + 100, usegmt=True)).encode()
    connection, _, pool, stream = asked(b"HTTP/1.1 429 x\r\n%b\r\ncontent-length: 4\r\n\r\nbusy" % sent)
    with pytest.raises(ServiceError) as failed:
        await stream.read()
    assert failed.value.retry_after == pytest.approx(RETRY_AFTERS[header], abs=2 if "in_100" in header else 0)
    stream.close()
    assert pool.kept == [connection]


@pytest.mark.parametrize(("status", "pause"), [(429, 7), (503, 7), (529, 7), (500, 0)])
async def test_the_time_for_which_a_provider_asks_to_be_left_alone(status: int, pause: int) -> None:
    *_, stream = asked(b"HTTP/1.1 %d x\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n" % status)
    with pytest.raises(ServiceError) as failed:
        await stream.read()
    assert (stream.pause, failed.value.retry_after) == (pause, pause or None)


async def test_a_rate_limit_whose_body_hangs() -> None:
    *_, stream = asked(b"HTTP/1.1 429 x\r\nretry-after: 7\r\ncontent-length: 99\r\n\r\nslow")
    stream.tick(31, ProviderTimeouts(), 1000)
    with pytest.raises(ProviderQuotaExhausted) as failed:
        await stream.read()
    assert (failed.value.retry_after, stream.answer.signal) == (7, ProviderSignal.CONGESTED)
    stream.close()


async def test_silence_after_the_finish_reason_ends_a_complete_answer() -> None:
    *_, stream = asked(CHUNKED + piece(token("a", "stop")))
    assert [delta.content for delta in await stream.read() or []] == ["a"]
    stream.tick(4.9, ProviderTimeouts(), 1000)
    assert not stream.answer.complete, "the usage may follow"
    stream.tick(0.2, ProviderTimeouts(), 1000)
    assert await stream.read() is None
    stream.close()


@pytest.mark.parametrize(
    ("hint", "seconds"), [("", 4), ("keep-alive: timeout=3\r\n", 2), ("Keep-Alive: timeout=60, max=9\r\n", 4)]
)
async def test_an_idle_connection_is_closed_before_the_provider_closes_it(hint: str, seconds: int) -> None:
    connection, _transport, pool = connected()
    head = b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n" % (hint.encode(), len(ANSWER))
    for number in (1, 2):  # the time begins again after each answer
        assert await whole(connection, head + ANSWER) == "a"
        assert pool.kept == [connection] * number
        connection.tick(seconds - 0.1)
        assert connection.is_usable()
    connection.tick(0.2)
    assert not connection.is_usable()


@pytest.mark.parametrize("arrives", [True, False])
async def test_the_total_time_is_checked_after_arrived_data_was_read(arrives: bool) -> None:
    """If the process stood still for longer than the total time, an answer that is complete by then is not lost."""
    connection, _, _, stream = asked(CHUNKED)
    limits = ProviderTimeouts(total=60)
    stream.tick(61, limits, 1000, late=60.9)
    if arrives:
        connection.data_received(piece(ANSWER) + END)
        assert [delta.content for delta in await stream.read() or []] == ["a"]
    stream.tick(0.1, limits, 1000)
    if arrives:
        assert await stream.read() is None
    else:
        with pytest.raises(ProviderTimeout):
            await stream.read()
    stream.close()


@session
async def test_connections_that_died_while_idle(app: App, provider: FakeProvider) -> None:
    """The provider may close idle connections at any time. The next request uses another one."""
    dying = provider.plays(tokens("x"), Raw(b"0\r\n\r\n"), 0.05, CLOSE)
    await asyncio.gather(*(app.ask(dying, token=app.token(f"u{n}")) for n in range(8)))
    await asyncio.sleep(0.3)
    prompt = provider.plays(tokens("alive"))
    for _ in range(5):
        assert answered(await app.ask(prompt))["text"] == "alive"
    assert len(provider.asked(prompt)) == 5
