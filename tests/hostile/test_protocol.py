"""The gateway finds the same requests as h11, another strict parser, in unusual requests that arrive in pieces.

It sends one answer per request. It may refuse a request that h11 accepts, but only for the reasons in STRICTER. It
never finds a request that h11 does not find.
"""

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.server.protocol import HttpConnection

REQUESTS = 100_000
SEED = 20_261_123
METHODS = [b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"PATCH"]
TARGETS = b"/|/x|/a/b?c=d|/%41|/%zz|//x/y|http://x/y?z|/\xc3\xa4|/a\tb|*|/a\x00b|x||/a b".split(b"|")
VERSIONS = [b"HTTP/1.1"] * 12 + [b"HTTP/1.0"] * 3
VERSIONS += [b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b""]
HOSTS = [[b"Host: x"]] * 20 + [[], [b"Host: x", b"Host: y"], [b"host:x"], [b"Host : x"], [b"Host: "]]
EXTRA = b"""Connection: close|HttpConnection: keep-alive|HttpConnection: Upgrade|connection: upgrade, x|Upgrade: h2c
|Upgrade: websocket|Expect: 100-continue|X: y|X:|X:  y  |x\t: y|: y|X|X y: z|X: \x00|X: a\rb|X: \xff|HTTP2-Settings: AA
| folded|Sec-WebSocket-Key: x|Upgrade: h2c, foo/2""".replace(b"\n", b"").split(b"|")
LENGTHS = b"+%d|-%d|0x%d|%d | %d|0%d|%d, %d|%d a|%d.0|\t%d|%d;".split(b"|")
ENCODINGS = b"gzip|gzip, chunked|chunked, gzip|Chunked|chunked, chunked|identity|xchunked|chunked;x".split(b"|")
SIZES = [b"%x"] * 12 + b"%X|0%x|%x;a=b|%x ;a| %x|+%x|0x%x|%x\t".split(b"|")
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

# Syntax that the gateway refuses and h11 accepts. No client sends it.
STRICTER = re.compile(
    rb"(?<!\r)\n|\r(?!\n)|\n[ \t]"  # bare line feeds and returns, folded headers
    rb"|content-length:[^\n]*,|content-length[^\0]*content-length"  # the same length twice
    rb"|transfer-encoding[^\0]*content-length|content-length[^\0]*transfer-encoding"  # a length and chunks
    rb"|transfer-encoding[^\0]*HTTP/1\.0|HTTP/1\.0[^\0]*transfer-encoding"  # chunks in HTTP/1.0
    rb"|^[0-9a-f]+[ \t]"  # blanks after the size of a chunk
    rb"|HTTP/(?!1\.[01]\r)"  # other versions
    rb"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"  # control characters
    rb"|[A-Z]{3,} (?!/)|[A-Z]{3,} [^ ]*[\x80-\xff]",  # targets other than paths
    re.IGNORECASE | re.MULTILINE,
)
# Syntax that a server may accept although h11 does not (RFC 9112, section 3): several spaces in the first line.
LAXER = re.compile(rb"[A-Z]{3,}  |[A-Z]{3,} [^ \r\n]*  +HTTP")

Requests = list[tuple[bytes, bytes]]  # method and body of each complete request


def make_odd_request(dice: random.Random) -> bytes:
    method = dice.choice(METHODS)
    body = dice.randbytes(dice.choice([0, 0, 1, 5, 30])) if dice.random() < 0.5 else SMUGGLED
    headers = [*dice.choice(HOSTS), *dice.sample(EXTRA, dice.choice([0, 0, 0, 1, 1, 2, 3]))]
    framing = dice.random()
    if framing < 0.3:
        headers.append(b"Content-Length: %d" % (len(body) + dice.choice([0] * 8 + [1, -1, 7])))
    elif framing < 0.4:
        headers.append(b"Content-Length: " + dice.choice(LENGTHS).replace(b"%d", b"%d" % len(body)))
    elif framing < 0.7:
        headers.append(b"Transfer-Encoding: " + (b"chunked" if dice.random() < 0.8 else dice.choice(ENCODINGS)))
        body = encode_chunks(dice, body)
        if dice.random() < 0.1:
            headers.append(b"Content-Length: %d" % len(body))
    elif framing < 0.75:
        headers += [b"Content-Length: %d" % (len(body) + more) for more in (0, dice.choice([0, 1]))]
    else:
        body = b""
    dice.shuffle(headers)
    target = b"/x" if dice.random() < 0.6 else dice.choice(TARGETS)
    version = b"HTTP/1.1" if dice.random() < 0.7 else dice.choice(VERSIONS)
    end = b"\r\n" if dice.random() < 0.97 else dice.choice([b"\n", b"\r", b"\r\r\n"])
    return end.join([method + b" " + target + b" " + version, *headers, b"", b""]) + body


def encode_chunks(dice: random.Random, body: bytes) -> bytes:
    parts = []
    while body:
        size = dice.randint(1, len(body))
        parts.append(dice.choice(SIZES) % size + b"\r\n" + body[:size] + (b"\r\n" if dice.random() < 0.97 else b""))
        body = body[size:]
    trailers = dice.choice([b""] * 8 + [b"X: y\r\n", b"Host: z\r\n", b"Content-Length: 5\r\n", b"bad\r\n"])
    return b"".join(parts) + dice.choice([b"0"] * 9 + [b"00", b"0;x"]) + b"\r\n" + trailers + b"\r\n"


def make_conversation(dice: random.Random) -> tuple[bytes, int]:
    number = dice.choice([1, 1, 2, 3, 5])
    data = b"".join(make_odd_request(dice) for _ in range(number))
    if dice.random() < 0.1:
        at = dice.randrange(len(data))
        data = data[:at] + dice.choice([b"", b"\0", b"\r\n", b" ", b"\n", b"x", dice.randbytes(1)]) + data[at + 1 :]
    return data, number


def split_randomly(dice: random.Random, data: bytes) -> Iterator[bytes]:
    while data:
        size = dice.choice([1, 2, 5, 17, 100, 1_000, 10_000])
        yield data[:size]
        data = data[size:]


def read_with_h11(data: bytes) -> tuple[Requests, str]:
    """Returns the requests, and how the data ends: "refused", "waiting" for more bytes, or "ended"."""
    found: Requests = []
    while data := data.lstrip(b"\r\n"):  # servers skip line breaks before a request (RFC 9112, section 2.2)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=100_000)
        connection.receive_data(data)
        try:
            request, body = connection.next_event(), b""
            if not isinstance(request, h11.Request):
                return found, "waiting"
            if request.method not in METHODS:  # h11 accepts any word
                return found, "refused"
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            return found, "refused"
        if not isinstance(event, h11.EndOfMessage):
            return found, "waiting"
        found.append((request.method, body))
        connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is not h11.DONE:
            break
        data = connection.trailing_data[0]
    return found, "ended"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.closing = b"", False

    def write(self, data: Any) -> None:
        assert not self.closing, "the connection was written to after its end"
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Site:
    """An ASGI app that answers each request once it has the whole body."""

    def __init__(self) -> None:
        self.found: Requests = []
        self._config = uvicorn.Config(self, lifespan="off", log_config=None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                self.found.append((scope["method"].encode(), body))
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def read_connection(self, parts: Iterator[bytes]) -> tuple[Requests, bytes]:
        """Sends the parts over one connection, and returns the requests and the answers."""
        self.found = []
        state, transport = ServerState(), Transport()
        connection = HttpConnection(self._config, state, {})
        connection.connection_made(transport)
        for part in parts:
            if not transport.closing:
                connection.data_received(part)
            await asyncio.sleep(0)
        for _ in range(200):
            if not state.tasks or transport.closing:
                break
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        return self.found, transport.written


@pytest.mark.timeout(600)
async def test_odd_requests_have_the_meaning_that_a_strict_parser_gives_them() -> None:
    site, dice, sent, refusals = Site(), random.Random(SEED), 0, 0
    while sent < REQUESTS:
        data, number = make_conversation(dice)
        sent += number
        found, answers = await site.read_connection(split_randomly(dice, data))
        refused = answers.count(b"HTTP/1.1 4")
        refusals += refused
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == len(found), (data, answers)
        assert refused <= 1, (data, answers)
        if LAXER.search(data):
            continue
        wanted, end = read_with_h11(data)
        assert found == wanted[: len(found)], (data, wanted, found)
        if end == "refused":
            assert refused, (data, wanted, found)
        elif len(found) < len(wanted) or (refused and end == "ended"):
            assert refused, (data, wanted, found)
            assert STRICTER.search(data), (data, wanted, found)
    assert REQUESTS / 10 < refusals < REQUESTS * 0.8, "too few or too many requests were refused"
