"""One request as ASGI delivers it: its headers, its body and its answer."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from gateway.errors import Headers, MultimodalUnsupported, RequestMalformed, RequestTooLarge, ServiceError, TokenFault
from gateway.ids import request_id
from gateway.inference.backlog import PIECE_BYTES, Backlog
from gateway.inference.formats.completion import Format
from gateway.inference.provider.connection import ClientGone, Stream
from gateway.telemetry.spans import NULL_TRACE, Trace
from gateway.telemetry.usage import Attempt, LimitUses

BODY_BYTES = 102_400  # of a body at most
LENGTH_DIGITS = 18  # of a Content-Length; Python refuses to read thousands of them
BODY_SECONDS = 30.0  # within which a body must arrive
MEDIA_TYPES = (
    b"image/",
    b"audio/",
    b"video/",
    b"multipart/",
    b"application/pdf",
    b"application/octet-stream",
)
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
SINGLETONS = (b"authorization", b"origin", b"content-type", b"content-length")  # headers that may appear only once
DUPLICATE = b"several"  # the value of one that appears more than once: no copy of it can be trusted


class Connection(Protocol):
    """What the service's own server offers beyond ASGI (`gateway/server/protocol.py`): fewer steps for each token."""

    transport: Any
    stalled: bool
    on_lost: Callable[[], None] | None
    on_drained: Callable[[], None] | None

    def take_body(self) -> bytes | None: ...
    def write_chunk(self, body: bytes, head: Headers | None = None, last: bool = False) -> bool: ...
    def end(self, reason: str) -> None: ...


class InferenceRequest:
    """One request, with everything that its answer and its log line need."""

    __slots__ = (
        "account",
        "admitted",
        "app",
        "attempts",
        "authorization",
        "began",
        "code",
        "connection",
        "content_encoding",
        "content_length",
        "content_type",
        "first_token",
        "format",
        "headers",
        "host",
        "limits",
        "max_tokens",
        "method",
        "model",
        "nano_euro",
        "origin",
        "origin_allowed",
        "path",
        "preflight_headers",
        "reason",
        "receive",
        "region",
        "request_id",
        "reserved",
        "send",
        "status",
        "stream",
        "trace",
        "waited",
        "wants_stream",
        "watcher",
    )

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.receive, self.send = receive, send
        self.connection: Connection | None = scope["state"].get("connection") if "state" in scope else None
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = request_id()
        self.began = time.perf_counter()
        self.first_token: float | None = None
        self.status, self.code = 0, ""
        self.account = self.app = self.model = self.format = ""
        self.origin_allowed = False  # True if there is no origin, or it is one of the app's
        self.admitted = False
        self.nano_euro = self.max_tokens = 0
        self.reason: TokenFault | None = None
        self.reserved = 0  # nano-euro
        self.waited = 0.0  # seconds, for a permit
        self.limits: LimitUses = ()
        self.stream: Stream | None = None  # of the last attempt
        self.attempts: tuple[Attempt, ...] = ()  # at providers
        self.region = ""  # of the provider of the last one
        self.trace: Trace = NULL_TRACE
        self.watcher: asyncio.Task[None] | None = None
        self.headers: Headers = [(b"x-request-id", self.request_id.encode())]
        self._read_headers(scope["headers"])

    def _read_headers(self, headers: Headers) -> None:
        found = dict(headers)
        if len(found) < len(headers):
            found = _combine(headers)
        self.host = found.get(b"host", b"")
        self.origin = found.get(b"origin")
        self.authorization = found.get(b"authorization")
        self.content_type = found.get(b"content-type")
        self.content_length = found.get(b"content-length")
        self.content_encoding = found.get(b"content-encoding")
        self.preflight_headers = found.get(b"access-control-request-headers")
        self.wants_stream = found.get(b"accept", b"").lower().find(b"text/event-stream") >= 0

    async def read_body(self) -> bytes:
        """Reads at most BODY_BYTES. Raises the fault of the headers or the size, or ClientGone."""
        if self.content_type is not None:
            kind = self.content_type.partition(b";")[0].strip().lower()
            if kind.startswith(MEDIA_TYPES):
                raise MultimodalUnsupported
            if kind != b"application/json":
                raise RequestMalformed("Send the body as 'Content-Type: application/json'.")
        if self.content_encoding is not None and self.content_encoding.lower() != b"identity":
            raise RequestMalformed("Send the body uncompressed, without a Content-Encoding.")
        length = self.content_length
        if length is not None and (len(length) > LENGTH_DIGITS or not length.isdigit() or int(length) > BODY_BYTES):
            raise RequestTooLarge
        if self.connection is not None and (body := self.connection.take_body()) is not None:
            if len(body) > BODY_BYTES:
                raise RequestTooLarge
            return body
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._receive_body()
        except TimeoutError:
            raise RequestMalformed(f"The body did not arrive within {BODY_SECONDS:.0f} seconds.") from None

    async def _receive_body(self) -> bytes:
        body, more = b"", True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message["body"]
            body = body + part if body else part
            if len(body) > BODY_BYTES:
                raise RequestTooLarge
            more = message.get("more_body", False)
        return body

    @property
    def stalled(self) -> bool:
        """Returns whether the client has stopped reading. Under another server this is unknown: there, `send` waits."""
        return self.connection is not None and self.connection.stalled

    @property
    def is_gone(self) -> bool:
        """Returns whether the client has left, as far as the service's own server knows."""
        return self.connection is not None and self.connection.transport.is_closing()

    def watch(self, fail: Callable[[Exception], None], resume: Callable[[], None] | None = None) -> None:
        """Calls `fail` when the client leaves, and `resume` when a stalled client reads again.

        Our own server calls back; under another server a task waits for the disconnect.
        """
        if (connection := self.connection) is None:
            self.watcher = asyncio.create_task(self._wait_for_disconnect(fail))
            return
        connection.on_lost, connection.on_drained = lambda: fail(ClientGone()), resume
        if connection.transport.is_closing():
            fail(ClientGone())

    def unwatch(self) -> None:
        if self.connection is not None:
            self.connection.on_lost = self.connection.on_drained = None
        elif self.watcher is not None:
            self.watcher.cancel()

    async def _wait_for_disconnect(self, fail: Callable[[Exception], None]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        fail(ClientGone())

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": self.headers + headers})

    async def send_body(self, body: bytes) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def stream_body(self, body: bytes, *, last: bool = False) -> None:
        """Sends a part of the streamed answer, after its head if it is the first part."""
        head = None if self.status else self.headers + STREAM_HEADERS
        self.status = self.status or 200
        if self.connection is not None and self.connection.write_chunk(body, head, last):
            return
        if head is not None:
            await self.send({"type": "http.response.start", "status": 200, "headers": head})
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})

    async def keep_alive(self, format: Format) -> None:
        if not self.stalled:
            await self.stream_body(format.keep_alive())

    def disconnect(self) -> None:
        """Ends the connection of a client that reads too slowly."""
        if self.connection is not None:
            self.connection.end("stalled")

    async def answer(self, body: bytes, backlog: Backlog | None = None) -> None:
        """Sends `body`. A long one is sent in pieces, as fast as the client takes them."""
        await self.start(
            200,
            [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"cache-control", b"no-store"),
            ],
        )
        if backlog is not None and len(body) > PIECE_BYTES:
            if not all(backlog.add(body[start : start + PIECE_BYTES]) for start in range(0, len(body), PIECE_BYTES)):
                self.disconnect()
                raise ClientGone
            del body
            while backlog:
                await self.send({"type": "http.response.body", "body": backlog.next_piece(), "more_body": True})
            body = b""
        await self.send_body(body)

    async def refuse(self, error: ServiceError) -> None:
        self.code, self.reason = error.code, error.reason
        headers, body = error.render(self.request_id, charged=self.nano_euro > 0)
        await self.start(error.status, headers)
        await self.send_body(body)


def _combine(headers: Headers) -> dict[bytes, bytes]:
    """Returns each header's value: its lines joined with commas, or DUPLICATE if it may appear only once."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in SINGLETONS:
            found[name] = DUPLICATE
        else:
            found[name] += b", " + value
    return found
