"""uvicorn with limits on what a client may send, on how long it may hold a connection, and on their number.

uvicorn alone waits forever for the end of a request's head or body, accepts a head or trailers of any size, queues any
number of pipelined requests, and keeps a connection whose client stopped reading. `BoundedProtocol` counts the bytes
that are neither head nor body. Once a second, `sweep_connections` closes idle connections, and aborts those that
exceed a time limit. `TimedReceive` bounds the time of a body and leaves the application a chance to answer.

Connections are bounded by the descriptors of the process, so that each client's stream still finds one for the
provider. When all are taken, those that owe us the rest of a request make room, the longest waiting first.

The protocol also gives the token path short cuts past ASGI's coroutines and messages, as
`scope["state"]["connection"]`: `take_body`, `write_chunk`, and `on_lost` instead of a task that waits for
`http.disconnect`. Under another server, the token path works without them.

`BoundedProtocol` overrides methods of a uvicorn module that is not public, so pyproject.toml pins uvicorn's minor
version.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import os
import resource
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import log
from gateway.errors import BackboneUnavailable, Headers, RequestMalformed
from gateway.ids import request_id
from gateway.settings import Settings
from gateway.supervisor import METRICS_FOLDER, Supervisor, metrics_folder

HEAD_BYTES = 65_536  # of a request line and its headers; also of trailers
KEEP_ALIVE_SECONDS = 5.0  # from an answer to the next request; uvicorn's own `timeout_keep_alive` is not in use
HEAD_SECONDS = 15.0  # from the start of a connection or a request to the end of the head
BODY_SECONDS = 30.0  # that a body may take to arrive, and
BODY_RATE = 16_384  # one second more for so many bytes that have arrived,
UPLOAD_SECONDS = 600.0  # but never more than this
STALL_SECONDS = 60.0  # that a client may leave a response unread
LEFTOVER_SECONDS = 5.0  # that a body may continue after its response
LOOK_SECONDS = 1.0  # between two looks for connections that exceed a limit
PIPELINED = 16  # requests of one connection that may wait for the answer to an earlier one

DESCRIPTORS = 65_536  # at most, of one process; more gains nothing on one core
FRESH_SECONDS = 1.0  # that a connection may wait for a request before it makes room for others
END_SECONDS = 10  # at a stop, from the end of the drain until what still runs is cut
RESERVED_DESCRIPTORS = 512  # for Redis, key sets, files; a quarter of them all if that is less

CONNECTIONS: set[BoundedProtocol] = set()
ENDED: collections.Counter[str] = collections.Counter()  # since the last count, by reason


class Room:
    """How many connections this process takes."""

    def __init__(self) -> None:
        self.most = most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._none_until = 0.0  # on the loop's clock: before that, no connection can make room

    def make(self, now: float) -> bool:
        """Whether one more fits, after evicting those that wait longest for a request if need be."""
        if len(CONNECTIONS) < self.most:
            return True
        if now < self._none_until:
            return False
        waiting = [c for c in CONNECTIONS if c.is_waiting_for_request()]
        # One in a hundred at once, because finding them takes a pass over all.
        victims = heapq.nsmallest(self.most // 100 + 1, waiting, key=lambda c: c.precedence(now))
        for victim in victims:
            CONNECTIONS.discard(victim)
            victim.end("evicted")
        if not victims:
            self._none_until = now + 0.1
        return bool(victims)


def most_connections(descriptors: int) -> int:
    """Half of the descriptors beside the reserve, because each stream takes another one to the provider."""
    usable = DESCRIPTORS if descriptors == resource.RLIM_INFINITY else min(descriptors, DESCRIPTORS)
    return max((usable - min(RESERVED_DESCRIPTORS, usable // 4)) // 2, 1)


class _Pipeline(list[Any]):
    """What uvicorn uses of a deque. An empty deque takes 600 bytes, and each connection would have three."""

    __slots__ = ()

    def appendleft(self, request: Any) -> None:
        self.insert(0, request)


def _lighten(event: asyncio.Event) -> None:
    event._waiters = []  # type: ignore[assignment]  # instead of a deque


class BoundedProtocol(HttpToolsProtocol):
    # Slots keep uvicorn's own attributes below the 30 up to which instances share the keys of their dictionaries: that
    # is a kilobyte a connection.
    __slots__ = (
        "answering",
        "closing_since",
        "head_begun",
        "idle_bytes",
        "on_lost",
        "since",
        "stalled",
        "stalled_since",
        "uploading",
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self.idle_bytes = 0  # received since the last of a head or a body
        self.head_begun = False  # the head of a request is under way
        self.uploading = False  # a body is under way; else a head is, or is awaited
        self.since = 0.0  # when the connection began to wait for that head or body, on the loop's clock
        self.stalled = False  # the client does not read
        self.stalled_since = 0.0
        self.closing_since: float | None = None
        self.answering: RequestResponseCycle | None = None  # the request whose answer is under way, or was the last
        self.on_lost: Callable[[], None] | None = None

    # -- short cuts for the token path -----------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        """The body of the request that is being answered, once; None while some of it has yet to arrive.

        The headers must have been read: an open stream keeps neither.
        """
        cycle = self.answering
        if cycle is None or cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.scope["headers"] = ()
        self.flow.resume_reading()
        return body

    def write_chunk(self, body: bytes, head: Headers | None = None, last: bool = False) -> bool:
        """Writes one chunk of a chunked response, in one write with what is before and after it.

        `head` starts the response, with status 200; `last` ends it. Returns False, and writes nothing, if the client
        reads too slowly, or left.
        """
        if self.stalled or self.transport.is_closing():
            return False
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        if head is not None:
            chunk = self._start_response(head) + chunk
        if last:
            chunk += b"0\r\n\r\n"
        self.transport.write(chunk)
        if last:
            self._end_response()
        return True

    def _start_response(self, headers: Headers) -> bytes:
        cycle = self.answering
        assert cycle is not None
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding, cycle.expected_content_length = True, 0
        lines = b"\r\n".join(map(b": ".join, cycle.default_headers + headers))
        closing = b"" if cycle.keep_alive else b"\r\nconnection: close"
        return b"HTTP/1.1 200 OK\r\n%b%b\r\ntransfer-encoding: chunked\r\n\r\n" % (lines, closing)

    def _end_response(self) -> None:
        cycle = self.answering
        assert cycle is not None
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    # -- the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        _lighten(self.flow._is_writable_event)
        self.since = self.loop.time()
        if ROOM.make(self.since):
            CONNECTIONS.add(self)
        else:
            self._refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn notifies the newest request only, though with pipelining an older one may be under way.
        if (cycle := self.answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self.pipeline.clear()
        CONNECTIONS.discard(self)
        if self.on_lost is not None:
            self.on_lost()

    def _refuse(self) -> None:
        ENDED["refused"] += 1
        error = BackboneUnavailable("This process has no connection left; send the request again.")
        headers, body = error.render(request_id())
        lines = [b"HTTP/1.1 503 Service Unavailable", *(b"%b: %b" % header for header in headers), b"connection: close"]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()

    def end(self, reason: str) -> None:
        ENDED[reason] += 1
        self.transport.abort()

    # -- what arrives ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.idle_bytes += len(data)
        super().data_received(data)
        # A head without an end; or line breaks, chunk extensions or trailers, which nobody else bounds.
        if self.idle_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_431_response()

    def send_431_response(self) -> None:
        self._send_and_close(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        )

    def send_400_response(self, msg: str) -> None:
        body = msg.encode("ascii")
        self._send_and_close(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )

    def _send_and_close(self, answer: bytes) -> None:
        if self.is_answering() and self.answering is not None and self.answering.response_started:
            self.end("garbage")  # the answer would land in the middle of another one
        else:
            self.transport.write(answer)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self.head_begun = True
        self.since = self.loop.time()

    def on_headers_complete(self) -> None:
        # `idle_bytes` may include a body that arrived with the head, so over the limit the headers are added up.
        if self.idle_bytes > HEAD_BYTES and sum(len(n) + len(v) + 4 for n, v in self.headers) > HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser answers 400 and closes
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many pipelined requests")
        self.head_begun = False
        self.uploading = True
        self.idle_bytes = 0
        super().on_headers_complete()
        _lighten(self.cycle.message_event)
        self.headers = []  # trailers land here, and not in the headers of the request

    def on_body(self, body: bytes) -> None:
        self.idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.uploading = False
        if not self.is_answering():
            self.since = self.loop.time()  # the rest of a body came after its answer
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: uvicorn would ask for a WebSocket library. The request is answered without the upgrade."""

    # -- what is sent ----------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """As uvicorn's, but without a timer for each answer: `sweep_connections` closes idle connections."""
        if not self.head_begun:
            self.since = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def pause_writing(self) -> None:
        self.stalled = True
        self.stalled_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.stalled = False
        super().resume_writing()

    # -- time ------------------------------------------------------------------------------------------------

    def is_answering(self) -> bool:
        return self.answering is not None and not self.answering.response_complete

    def is_waiting_for_request(self) -> bool:
        """For its head or its body, and nothing else is under way."""
        return self.uploading or not self.is_answering()

    def precedence(self, now: float) -> tuple[bool, bool, float]:
        """The least of them makes room first: honest clients send a head at once, and a body may well take longer."""
        fresh = now - self.since < FRESH_SECONDS
        return fresh, self.uploading and not fresh, self.since

    def is_overdue(self, now: float) -> bool:
        if self.transport.is_closing():  # but the client does not read what is left
            if self.closing_since is None:
                self.closing_since = now
            return now - self.closing_since > STALL_SECONDS
        if self.stalled and now - self.stalled_since > STALL_SECONDS:
            return True
        waited = now - self.since
        if self.uploading:
            answered = self.cycle is not None and self.cycle.response_complete
            return waited > (LEFTOVER_SECONDS if answered else UPLOAD_SECONDS + LEFTOVER_SECONDS)
        return (self.head_begun or not self.is_answering()) and waited > HEAD_SECONDS

    def is_idle(self, now: float) -> bool:
        """Whether it has waited longer than KEEP_ALIVE_SECONDS for another request."""
        if self.answering is None or self.is_answering() or self.head_begun or self.uploading:
            return False
        return now - self.since > KEEP_ALIVE_SECONDS


ROOM = Room()


def raise_descriptor_limit() -> None:
    """Raises the soft limit, which is 1,024 on most systems, towards the hard one. Each process calls it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # macOS allows less than it says; the limit that is in force counts
    ROOM.most = most_connections(soft)


async def sweep_connections(count: Callable[[str, int], None] | None = None) -> None:
    """Runs for the life of the process. `count` receives why connections were ended, and how many."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = loop.time()
        ending = [c for c in CONNECTIONS if c.is_overdue(now) or c.is_idle(now)]
        for number, connection in enumerate(ending):
            if connection.is_overdue(now):
                connection.end("overdue")
            elif connection.is_idle(now):  # still: others ran in between
                connection.transport.close()
            if number % 50 == 49:
                await asyncio.sleep(0)  # thousands at once would delay every stream
        for reason, ended in ENDED.items():
            if count is not None:
                count(reason, ended)
        ENDED.clear()


class TimedReceive:
    """ASGI's `receive` of one request, which raises RequestMalformed if the body arrives too slowly or not at all."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        self._receive = receive
        self._began = asyncio.get_running_loop().time()
        self._bytes = 0
        self._whole = False
        self.answered = False  # a response has begun: there is no other answer any more

    async def __call__(self) -> Any:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._began + min(BODY_SECONDS + self._bytes / BODY_RATE, UPLOAD_SECONDS)):
                message = await self._receive()
        except TimeoutError:
            return self._fail(f"The body did not arrive in time: send at least {BODY_RATE // 1024} KiB per second.")
        if message["type"] == "http.disconnect":
            return self._fail("The body is incomplete.")
        self._bytes += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        return message

    def _fail(self, message: str) -> dict[str, str]:
        self._whole = True
        if self.answered:
            return {"type": "http.disconnect"}
        raise RequestMalformed(message)


def serve(host: str, port: int, workers: int, settings: Settings) -> int:
    """Runs the gateway until it is stopped. Returns the exit code."""
    config = uvicorn.Config(
        "gateway.app:create_app",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # it would log paths, and the path of a deploy hook is a secret
        server_header=False,
        proxy_headers=False,  # sessions.py reads X-Forwarded-For, and trusts it from a proxy only
        backlog=4096,
        # Streams end themselves when the drain is over. This ends what does not.
        timeout_graceful_shutdown=int(settings.drain) + END_SECONDS,
    )
    if workers == 1:
        os.environ.pop(METRICS_FOLDER, None)  # it may hold the figures of processes that are no more
        uvicorn.Server(config).run()
        return 0
    log.configure(settings)
    with metrics_folder() as folder:
        os.environ[METRICS_FOLDER] = str(folder)
        return Supervisor(config, config.bind_socket(), folder).run()
