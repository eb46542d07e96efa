"""HTTP/1.1 for the gateway's clients: llhttp (httptools) parses requests, and an ASGI application answers them.

A connection reads requests until it is `over`: the client asks to close it, sends invalid HTTP, or the process stops.

    head     from the first byte of a request to the end of its headers; here the connection waits for its next request
    body     from there to the end of the request; its exchange begins here
    over     nothing more is read

Exchanges are answered one at a time, in the order of their requests; the others wait in `queue`. The response to an
invalid request also waits for earlier responses. After it, the connection closes.

- **Upgrades are ignored.** After the head of an upgrade request, llhttp expects another protocol. It would read a body
  as the next request, so the head is parsed again without the upgrade.
- **Everything is limited**: the bytes of a head, of trailers and chunk extensions, the unread bytes of a body, the
  requests that wait, and the time for each (`is_overdue`, `is_idle`).
- **The token path has shortcuts** around ASGI's coroutines and messages, in `scope["state"]["connection"]`:
  `take_body`, `write_chunk`, `on_drained`, and `on_lost` instead of a task that waits for `http.disconnect`.

uvicorn creates a `Connection` for each client, and uses only its constructor, `shutdown` and `ServerState`.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec
import structlog
from uvicorn import Config
from uvicorn.server import ServerState

from gateway.errors import BackboneUnavailable, Headers
from gateway.ids import request_id
from gateway.server.connections import CONNECTION_LIMIT, CONNECTIONS, ENDED, ConnectionLimit
from gateway.server.exchange import STATUS_LINES, HttpExchange

logger = structlog.get_logger()

HEAD_BYTES = 65_536  # of a request line and its headers; also of trailers
BODY_BYTES = 65_536  # of a body that the application has not read yet; then reading pauses
PIPELINED_REQUESTS = 16  # of one connection that may wait for the response to an earlier one
KEEP_ALIVE_SECONDS = 5.0  # from a response to the next request
HEAD_SECONDS = 15.0  # from the start of a connection or a request to the end of the head
UPLOAD_SECONDS = 600.0  # that a body may take; `server.py` also limits slow ones
STALL_SECONDS = 60.0  # that a client may leave a response unread
LEFTOVER_SECONDS = 5.0  # that a body may continue after its response
FRESH_SECONDS = 1.0  # that a connection may wait for a request before others are preferred


class ConnectionTimes(msgspec.Struct, frozen=True):
    """How long each part of a connection may take, in seconds."""

    keep_alive: float = KEEP_ALIVE_SECONDS
    head: float = HEAD_SECONDS
    upload: float = UPLOAD_SECONDS
    stall: float = STALL_SECONDS
    leftover: float = LEFTOVER_SECONDS
    fresh: float = FRESH_SECONDS


TIMES = ConnectionTimes()
VERSIONS = ("1.1", "1.0")
FRAMING = {b"host", b"expect", b"transfer-encoding"}  # headers that this module checks in addition to llhttp


def render_refusal(status: int, identifier: str) -> bytes:
    reason = HTTPStatus(status).phrase.encode()
    head = b"x-request-id: %b\r\ncontent-type: text/plain; charset=utf-8\r\n" % identifier.encode()
    end = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(reason)
    return STATUS_LINES[status] + head + end + reason


class HttpConnection(asyncio.Protocol):
    __slots__ = (
        "answering",
        "app",
        "app_state",
        "client",
        "closing_since",
        "drained",
        "expects_continue",
        "head_begun",
        "headers",
        "hosts",
        "idle_bytes",
        "limit",
        "loop",
        "newest",
        "on_drained",
        "on_lost",
        "over",
        "parser",
        "queue",
        "reading_paused",
        "server",
        "server_state",
        "since",
        "stalled",
        "stalled_since",
        "times",
        "transport",
        "upgrading",
        "uploading",
        "url",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        times: ConnectionTimes = TIMES,
        limit: ConnectionLimit = CONNECTION_LIMIT,
    ) -> None:
        if not config.loaded:
            config.load()
        self.app, self.app_state, self.server_state = config.loaded_app, app_state, server_state
        self.times, self.limit = times, limit
        self.loop = _loop or asyncio.get_running_loop()
        self.parser: Any = httptools.HttpRequestParser(self)
        self.transport: Any = None
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        # -- reading
        self.over = False
        self.reading_paused = False
        self.upgrading = False  # the last head requests an upgrade
        self.url, self.headers = b"", list[tuple[bytes, bytes]]()
        self.hosts, self.expects_continue = 0, False  # of these headers
        self.idle_bytes = 0  # received since the last part of a head or a body
        self.head_begun = False  # the head of a request is incomplete
        self.uploading = False  # a body is incomplete; otherwise the connection waits for a head
        self.since = 0.0  # when the connection began to wait for that head or body, on the loop's clock
        self.newest: HttpExchange | None = None  # of the last request
        # -- answering
        self.answering: HttpExchange | None = None  # the current exchange, or the last one
        self.queue: list[HttpExchange] = []
        self.stalled = False  # the client does not read fast enough
        self.stalled_since = 0.0
        self.drained: asyncio.Future[None] | None = None
        self.closing_since: float | None = None
        self.on_lost: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None  # called when the client reads again

    # -- shortcuts for the token path -----------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        """Returns the body of the current request, once, or None while it is incomplete.

        The headers must have been read: to save memory, an open stream keeps neither headers nor body.
        """
        exchange = self.answering
        if exchange is None or exchange.more_body or exchange.gone:
            return None
        body, exchange.body = bytes(exchange.body), bytearray()
        exchange.scope["headers"] = ()
        self.resume_reading()
        return body

    def write_chunk(self, body: bytes, head: Headers | None = None, last: bool = False) -> bool:
        """Writes a part of a body of unknown length, in one write with the head and the end of the response.

        `head` starts a response with status 200, and `last` ends it. Returns False, without writing, if the client
        reads too slowly or has disconnected.
        """
        if self.stalled or self.transport.is_closing():
            return False
        exchange = self.answering
        assert exchange is not None
        if head is None:
            data = exchange.frame(body, last=last)
        else:
            data = self._start_stream(exchange, head) + exchange.frame(body, last=last)
        self.transport.write(data)
        if last:
            exchange.finish()
        return True

    def _start_stream(self, exchange: HttpExchange, headers: Headers) -> bytes:
        exchange.started, exchange.expects_continue = True, False
        lines = b"\r\n".join(map(b": ".join, self.server_state.default_headers + headers))
        closing = b"" if exchange.keep_alive else b"connection: close\r\n"
        return b"HTTP/1.1 200 OK\r\n%b\r\n%b%b\r\n" % (lines, exchange.open_body(), closing)

    # -- the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.client = tuple(peer[:2]) if isinstance(peer, tuple) else None
        self.server = tuple(own[:2]) if isinstance(own, tuple) else None
        self.since = self.loop.time()
        if self.limit.make_room(self.since):
            CONNECTIONS.add(self)
        else:
            self._reject()

    def _reject(self) -> None:
        ENDED["refused"] += 1
        error = BackboneUnavailable("This process has no free connection; send the request again.")
        headers, body = error.render(identifier := request_id())
        headers.append((b"x-request-id", identifier.encode()))
        lines = [b"HTTP/1.1 503 Service Unavailable", *(b"%b: %b" % header for header in headers), b"connection: close"]
        self._answer_and_close(b"\r\n".join([*lines, b"", body]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        CONNECTIONS.discard(self)
        self.over = True
        for exchange in (self.answering, self.newest):
            if exchange is not None and not exchange.complete:
                exchange.abandon()
        self.resume_writing()
        self.queue.clear()
        self.parser = None  # it refers to this object, and so do the exchanges
        self.newest = None
        if self.on_lost is not None:
            self.on_lost()

    def eof_received(self) -> None:
        """Lets the transport close: a client that has stopped sending counts as gone."""

    def shutdown(self) -> None:
        """Answers the current request and no other, because the process stops."""
        if self.newest is None or not self.is_answering():
            self.transport.close()
        else:
            self.newest.keep_alive = False
            self.over = not self.uploading

    def end(self, reason: str) -> None:
        ENDED[reason] += 1
        self.transport.abort()

    def close(self) -> None:
        self.transport.close()

    # -- reading ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.idle_bytes += len(data)
        if self.over:  # reading continues, because otherwise a disconnect would go unnoticed
            if self.idle_bytes > HEAD_BYTES:
                self.end("garbage")
            return
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self._refuse(400)
                return
        # An endless head, line breaks, chunk extensions or trailers: llhttp does not limit them.
        if self.idle_bytes > HEAD_BYTES:
            self._refuse(431)

    def _without_upgrade(self) -> bytes:
        """Returns the last head without its upgrade, which a server may ignore (RFC 9110, section 7.8)."""
        self.upgrading = False
        kept = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(v for v in map(bytes.strip, value.split(b",")) if v.lower() != b"upgrade")
            if name != b"upgrade" and (value or name != b"connection"):
                kept.append(name + b": " + value)
        return b"\r\n".join([*kept, b"", b""])

    def _refuse(self, status: int) -> None:
        """Stops reading, answers the newest request with an error, and closes."""
        if self.over:
            return
        self.over = True
        exchange = self.newest
        if not self.uploading or exchange is None:  # the fault is in a head
            exchange = HttpExchange(self, {}, keep_alive=False, expects_continue=False)
            if self.is_answering():
                self.queue.append(exchange)
            else:
                self.answering = exchange
        exchange.fault, exchange.keep_alive = render_refusal(status, request_id()), False
        if exchange is not self.answering:
            return
        if exchange.complete:
            self.transport.close()
        elif not exchange.started:
            exchange.abandon()
            self._answer_and_close(exchange.fault)

    def _answer_and_close(self, answer: bytes) -> None:
        self.over = True
        self.transport.write(answer)
        self.transport.close()

    def pause_reading(self) -> None:
        if not self.reading_paused:
            self.reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.reading_paused:
            self.reading_paused = False
            self.transport.resume_reading()

    # -- llhttp's callbacks -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.over:
            raise ValueError("the connection reads no more requests")
        self.url, self.headers, self.hosts, self.expects_continue = b"", [], 0, False
        self.head_begun = True
        self.since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in FRAMING:
            self._check(name, value)
        self.headers.append((name, value))

    def _check(self, name: bytes, value: bytes) -> None:
        """Rejects what llhttp accepts against RFC 9112 (sections 3.2 and 6.1). Raises ValueError."""
        if name == b"host":
            self.hosts += 1
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue"
        elif value.lower() != b"chunked" or self.parser.get_http_version() == "1.0":
            raise ValueError("the transfer encoding is not supported")

    def on_headers_complete(self) -> None:
        parser = self.parser
        method = parser.get_method()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise ValueError("CONNECT is not supported")
            self.upgrading = True
            return
        # `idle_bytes` may include a body that arrived with the head, so above the limit the headers are added up.
        if self.idle_bytes > HEAD_BYTES and sum(len(n) + len(v) + 4 for n, v in self.headers) > HEAD_BYTES:
            raise ValueError("the head is too large")
        if len(self.queue) >= PIPELINED_REQUESTS:
            raise ValueError("too many pipelined requests")
        version = parser.get_http_version()
        if version not in VERSIONS:
            raise ValueError("the version of HTTP is not supported")
        if self.hosts != 1 and (self.hosts or version != "1.0"):
            raise ValueError("the request must have exactly one Host header")
        path, query = _split(self.url)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": "http",
            "root_path": "",
            "headers": self.headers,
            "state": {**self.app_state, "connection": self},
            "method": method.decode("ascii"),
            "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"),
            "raw_path": path,
            "query_string": query,
        }
        exchange = HttpExchange(self, scope, version != "1.0" and parser.should_keep_alive(), self.expects_continue)
        self.newest = exchange
        self.headers = []  # for trailers, which must not become headers of the request
        self.head_begun = False
        self.uploading = True
        self.idle_bytes = 0
        if self.is_answering():
            self.queue.append(exchange)
            self.pause_reading()
        else:
            self._start(exchange)

    def on_body(self, body: bytes) -> None:
        self.idle_bytes = 0
        exchange = self.newest
        assert exchange is not None
        if exchange.complete:
            return
        exchange.body += body
        exchange.has_news = True
        if len(exchange.body) > BODY_BYTES:
            self.pause_reading()
        exchange.wake()

    def on_message_complete(self) -> None:
        if self.upgrading:
            return
        exchange = self.newest
        assert exchange is not None
        self.uploading = False
        if not self.is_answering():
            self.since = self.loop.time()  # the body ended after its response
        self.over = not exchange.keep_alive
        exchange.more_body = False
        exchange.has_news = True
        exchange.wake()

    # -- writing ----------------------------------------------------------------------------------------

    def _start(self, exchange: HttpExchange) -> None:
        self.answering = exchange
        if exchange.fault:
            exchange.abandon()
            return self._answer_and_close(exchange.fault)
        exchange.task = self.loop.create_task(self._run(exchange))
        self.server_state.tasks.add(exchange.task)

    async def _run(self, exchange: HttpExchange) -> None:
        fault = "the application sent no complete response"
        try:
            await self.app(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:  # its text may contain a prompt or an answer
            fault = type(error).__name__
        finally:
            self.server_state.tasks.discard(exchange.task)
        if exchange.complete or exchange.gone:
            return
        identifier = request_id()
        logger.error("request.crashed", request_id=identifier, error=fault)
        if exchange.started:
            self.transport.close()
        else:
            exchange.abandon()
            self._answer_and_close(render_refusal(500, identifier))

    def on_response_complete(self, exchange: HttpExchange) -> None:
        self.server_state.total_requests += 1
        if not exchange.keep_alive:
            self.transport.close()
        if self.transport.is_closing():
            return
        if not self.head_begun:
            self.since = self.loop.time()
        self.resume_reading()
        if self.queue:
            self._start(self.queue.pop(0))

    async def drain(self) -> None:
        """Waits until the client reads again or has disconnected."""
        if self.drained is None:
            self.drained = self.loop.create_future()
        await asyncio.shield(self.drained)

    def pause_writing(self) -> None:
        self.stalled = True
        self.stalled_since = self.loop.time()

    def resume_writing(self) -> None:
        self.stalled = False
        if self.drained is not None:
            self.drained.set_result(None)
            self.drained = None
        if self.on_drained is not None:
            self.on_drained()

    # -- time ------------------------------------------------------------------------------------------------

    def is_answering(self) -> bool:
        return self.answering is not None and not self.answering.complete

    def is_waiting_for_request(self) -> bool:
        """Returns whether the connection waits only for the head or the body of a request."""
        return self.uploading or not self.is_answering()

    def eviction_key(self, now: float) -> tuple[bool, bool, float]:
        """Returns the sort key for evictions, lowest first.

        Connections that wait for a head come first, because clients send a head at once. Those that wait for a body
        follow, and new ones are last.
        """
        fresh = now - self.since < self.times.fresh
        return fresh, self.uploading and not fresh, self.since

    def is_overdue(self, now: float) -> bool:
        if self.transport.is_closing():  # and the client does not read the rest
            if self.closing_since is None:
                self.closing_since = now
            return now - self.closing_since > self.times.stall
        if self.stalled and now - self.stalled_since > self.times.stall:
            return True
        waited = now - self.since
        if self.uploading:
            answered = self.newest is not None and self.newest.complete
            return waited > (self.times.leftover if answered else self.times.upload + self.times.leftover)
        return (self.head_begun or not self.is_answering()) and waited > self.times.head

    def is_idle(self, now: float) -> bool:
        """Returns whether the connection has waited longer than the keep-alive for another request."""
        if self.answering is None or self.is_answering() or self.head_begun or self.uploading:
            return False
        return now - self.since > self.times.keep_alive


def _split(url: bytes) -> tuple[bytes, bytes]:
    """Returns path and query of a request's target. Raises ValueError."""
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError as error:
        raise ValueError("the target is not a valid address") from error
    return parsed.path or b"/", parsed.query or b""
