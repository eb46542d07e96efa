"""HTTP/1.1 to the provider: a `Connection` is the asyncio protocol, a `Stream` is one exchange on it.

llhttp parses the answer's framing, and sse.py its events. Bytes stay undecoded until the relay reads them, so that data
that arrives together leaves together. While the relay has more than HIGH_WATER_BYTES to read, the connection stops
reading.

A request is sent once. It is not retried after a byte may have reached the provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Protocol

import httptools

from gateway.errors import BackboneUnavailable, ProviderFailed, ProviderTimeout, ProviderUnreachable
from gateway.inference.formats.completion import Format
from gateway.inference.provider.chunks import Delta
from gateway.inference.provider.errors import ProviderSignal
from gateway.inference.provider.sse import AnswerReader
from gateway.settings import ProviderTimeouts

HIGH_WATER_BYTES = 65_536  # unread bytes of one stream
HEAD_BYTES = 65_536  # of an answer before its body
MAX_RETRY_AFTER_SECONDS = 3600.0
USAGE_SECONDS = 5.0  # for which the usage may follow the finish reason
IDLE_SECONDS = 4.0  # for which a connection is kept without a request; vLLM's and uvicorn's servers close it after 5
DRAIN_SECONDS = 1.0  # for which the HTTP message may continue after its answer is complete

_HEADERS = frozenset(
    {b"content-length", b"transfer-encoding", b"retry-after", b"retry-after-ms", b"keep-alive", b"content-encoding"}
)  # that this module reads
_KEEP_ALIVE_HINT = re.compile(rb"timeout *= *([0-9]{1,6})", re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_PARSER_ERRORS = (httptools.HttpParserError, httptools.HttpParserUpgrade)


class ClientGone(Exception):
    """The client left before it had the whole answer."""


class Interrupted(BackboneUnavailable):
    message = "The service restarted before the answer was complete; ask again."


class Stream:
    """One request and its answer. Call `read` until it returns None or raises an error."""

    __slots__ = (
        "_answering",
        "_connection",
        "_loop",
        "_nudged",
        "_pending",
        "_retry_after",
        "_silence",
        "_waiter",
        "age",
        "answer",
        "format",
        "forward",
        "refused",
        "status",
        "unsent",
    )

    def __init__(self, connection: ProviderConnection) -> None:
        self._connection: ProviderConnection | None = connection
        self._loop = connection.loop
        self._waiter: asyncio.Future[None] | None = None
        self.answer = AnswerReader(connection.received)
        self.status = 0  # 0 until the headers have arrived
        self._retry_after: float | None = None
        # A shortcut: sends data, encoded by `format`, while the relay waits in `read`. Returns False if it cannot send.
        self.forward: Callable[[bytes], bool] | None = None
        self.format: Format
        # Encoded, but not sent by `forward`. The relay sends it next; a format must not encode the same deltas twice.
        self.refused = b""
        self._pending: list[Delta] | None = None  # for the relay: what came with the end; [] for `refused` alone
        self._answering = False  # a byte of the answer has arrived
        self._nudged = False
        self.age = 0.0  # seconds
        self._silence = 0.0  # seconds since the provider last sent a byte
        self.unsent = 0.0  # seconds since the relay last sent something to the client

    # -- for the relay ---------------------------------------------------------------------------------------

    async def read(self) -> list[Delta] | None:
        """Returns the deltas that arrived since the last call; [] after a `nudge`, None after the end."""
        answer = self.answer
        while True:
            if self._pending is not None:
                deltas, self._pending = self._pending, None
                return deltas
            if answer.received and self.status == 200:
                if self._connection is not None:
                    self._connection.resume()
                if deltas := answer.read():
                    return deltas
            if answer.complete:
                return None
            if answer.failure is not None:
                raise answer.failure
            if answer.eof:
                if deltas := self._finish():
                    return deltas
                continue
            if self._nudged:
                self._nudged = False
                return []
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def put_back(self, deltas: list[Delta] | None) -> None:
        """Lets the next `read` return what this one has returned."""
        self._pending = deltas

    def fail(self, error: Exception, signal: ProviderSignal | None = None) -> None:
        """Ends the stream with `error`, unless it has ended already. The next `read` raises it."""
        self.answer.fail(error, signal)
        self._wake()

    @property
    def pause(self) -> float:
        """Seconds for which the provider asks to be left alone; 0 if it does not."""
        return (self._retry_after or 0.0) if self.status in (429, 503, 529) else 0.0

    def nudge(self) -> None:
        """Lets `read` return without data, because a keep-alive is due or a stalled client reads again."""
        self._nudged = True
        self._wake()

    def close(self) -> None:
        """Ends the exchange. Cancels the request at the provider if the answer is not complete."""
        if (connection := self._connection) is not None:
            self._connection = None
            connection.release(answer_complete=self.answer.complete)

    # -- for the connection ----------------------------------------------------------------------------------

    def start(self, status: int, retry_after: float | None) -> None:
        self.status, self._retry_after = status, retry_after

    def process_received(self) -> None:
        """Forwards the data that has just arrived, or wakes the relay."""
        self._answering = True
        self._silence = 0.0
        answer = self.answer
        if self._waiter is not None and self._pending is None and answer.received and self.status == 200:
            forward = self.forward
            out = b""
            if forward is not None and (texts := answer.read_texts()) is not None:
                out = self.format.texts(texts)
            else:
                deltas = answer.read()
                if forward is None or answer.complete:  # the relay sends it, with the end
                    self._pending = deltas or None
                else:
                    out = self.format.chunks(deltas)
            if out and forward is not None:
                if forward(out):
                    self.unsent = 0.0
                else:
                    self.refused, self._pending = out, []
            if not (self._pending is not None or answer.complete or answer.eof or answer.failure is not None):
                return
        elif answer.unread > HIGH_WATER_BYTES:
            self._pause()
        self._wake()

    def process_close(self) -> None:
        """Ends the stream after its connection has closed."""
        self._connection = None
        if not self._answering:
            self.fail(ProviderUnreachable(), ProviderSignal.FAILED)
        elif self.status not in (0, 200):
            self._finish()
        elif not self.answer.eof:
            self.cut(ProviderSignal.FAILED)
        self._wake()

    def cut(self, signal: ProviderSignal | None = None) -> None:
        """Ends the stream where its bytes break off, after it has read those that arrived."""
        if self.status == 200 and self.answer.received:
            self._pending = [*(self._pending or []), *self.answer.read()] or self._pending
        self.answer.cut(ProviderFailed(), signal)
        self._wake()

    def _finish(self) -> list[Delta]:
        """Ends the answer at the end of its bytes. Returns the deltas of a last event without its blank line."""
        if self.status == 200:
            return self.answer.read()
        self.answer.refuse(self.status, self._retry_after)
        return []

    def _pause(self) -> None:
        if self.status != 200:
            self._finish()
        elif self._connection is not None:
            self._connection.pause()

    def _wake(self) -> None:
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)

    # -- for the sweep ---------------------------------------------------------------------------------------

    def tick(self, seconds: float, limits: ProviderTimeouts, keep_alive: float, late: float = 0.0) -> None:
        """Counts the time that has passed, fails at a limit, and wakes the relay when a keep-alive is due.

        Silence is the provider's failure, and so are keep-alives alone for the total time: the model may hang behind a
        server that does not. An answer may also be old because it is long, or because its reader is slow.
        The `late` ones of the seconds do not count as silence either: this process stood still, and arrived data is
        unread. The total is therefore checked at the next sweep: an answer that is complete by then was paid for, and
        must not be lost.
        """
        self.age += seconds
        self.unsent += seconds
        connection = self._connection
        if connection is not None and not connection.paused and not self.answer.eof:
            self._silence += seconds - late
            if self.answer.finish is not None:
                if self._silence >= min(limits.idle, USAGE_SECONDS):
                    self.cut()
            elif self._silence >= (limits.idle if self.status else limits.first):
                if self.status not in (0, 200):  # the body of a refusal is late
                    self._finish()
                self.fail(ProviderTimeout(), ProviderSignal.FAILED)
        if self.age >= limits.total and not late:
            begun = self.answer.produced or self.answer.received
            self.fail(ProviderTimeout(), None if begun else ProviderSignal.FAILED)
        if self.unsent >= keep_alive:
            self.unsent = 0.0
            self.nudge()


class ConnectionState(enum.Enum):
    IDLE = "waits for a request"
    ACTIVE = "carries a stream"
    DRAINING = "waits for the end of an HTTP message after its answer is complete"
    CLOSED = "is closed, or about to close"


IDLE, ACTIVE, DRAINING, CLOSED = ConnectionState


class Pool(Protocol):
    """The owner of connections."""

    def keep(self, connection: ProviderConnection) -> None:
        """Keeps a connection that is idle again."""

    def forget(self, connection: ProviderConnection) -> None:
        """Forgets a connection that has closed."""


class ProviderConnection(asyncio.Protocol):
    __slots__ = (
        "_ended",
        "_framed",
        "_head_bytes",
        "_idle_seconds",
        "_parser",
        "_pool",
        "_retry_after",
        "_reusable",
        "_stream",
        "_waited",
        "loop",
        "on_body",
        "paused",
        "received",
        "state",
        "transport",
    )

    transport: asyncio.Transport
    on_body: Callable[[bytes], None]  # llhttp's callback

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.loop = asyncio.get_running_loop()
        self.state = IDLE
        self._idle_seconds = IDLE_SECONDS
        self._waited = 0.0  # seconds in the current state, if that is IDLE or DRAINING
        self._stream: Stream | None = None
        self.received: list[bytes] = []  # the current answer's body, until its stream reads it
        self.on_body = self.received.append  # takes each part of a body without a call of Python code
        self._parser = httptools.HttpResponseParser(self)
        self.paused = False
        # For the current answer:
        self._head_bytes = 0
        self._retry_after: float | None = None
        self._framed = False  # it declares its end, so an earlier close is a truncation
        self._ended = False  # its HTTP message has ended; later data belongs to no request
        self._reusable = False

    def post(self, head: bytes, payload: bytes) -> Stream:
        """Sends the request. `head` ends with "content-length: "."""
        self.state = ACTIVE
        self.received.clear()
        self._stream = stream = Stream(self)
        self._head_bytes = 0
        self._retry_after = None
        self._framed = self._ended = self._reusable = False
        self.transport.write(b"%b%d\r\n\r\n%b" % (head, len(payload), payload))
        return stream

    def release(self, *, answer_complete: bool) -> None:
        """Ends the stream. Keeps or drains the connection if the answer was read to its end; otherwise closes it."""
        self._stream = None
        if self._ended:
            self._return_to_pool()
        elif answer_complete:
            self.state, self._waited = DRAINING, 0.0
            self.resume()
        else:
            self.abort()

    def is_usable(self) -> bool:
        return self.state is IDLE and not self.transport.is_closing()

    def tick(self, seconds: float) -> None:
        """Counts the time that has passed, and closes a connection that has waited too long."""
        if self.state is IDLE or self.state is DRAINING:
            self._waited += seconds
            if self._waited >= (self._idle_seconds if self.state is IDLE else DRAIN_SECONDS):
                self.abort()

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.transport.resume_reading()

    def abort(self) -> None:
        self.state = CLOSED
        self.transport.abort()

    def _return_to_pool(self) -> None:
        if not self._reusable or self.transport.is_closing():
            self.abort()
            return
        self.state, self._waited = IDLE, 0.0
        self.resume()
        self._pool.keep(self)

    def _drain(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except _PARSER_ERRORS:
            self.abort()
        else:
            self.received.clear()
            if self._ended:
                self._return_to_pool()

    # -- asyncio's callbacks ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's transports only look like asyncio's

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        if stream is None:
            # Without a request or an answer to drain, the data belongs to nothing.
            return self._drain(data) if self.state is DRAINING else self.abort()
        try:
            self._parser.feed_data(data)
        except _PARSER_ERRORS:
            self._reusable = False
            if not self._ended:  # otherwise the fault is in bytes after the answer
                self._ended = True  # so that `release` closes the connection
                return stream.cut(ProviderSignal.FAILED)
        if not stream.status:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                return stream.fail(ProviderFailed(), ProviderSignal.FAILED)
        if self._ended:
            self.received.clear()
        stream.process_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = CLOSED
        self._pool.forget(self)
        if (stream := self._stream) is not None:
            self._stream = None
            if stream.status == 200 and not self._framed:
                stream.answer.eof = True
            stream.process_close()

    # -- llhttp's callbacks ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._ended:
            self._reusable = False  # a second answer, without a request

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower not in _HEADERS or self._ended:
            return
        if lower in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lower in (b"retry-after", b"retry-after-ms"):
            if (seconds := read_retry_after(value, in_ms=lower.endswith(b"-ms"))) is not None:
                self._retry_after = min(seconds, MAX_RETRY_AFTER_SECONDS)
        elif lower == b"keep-alive" and (hint := _KEEP_ALIVE_HINT.search(value)):
            self._idle_seconds = min(IDLE_SECONDS, int(hint[1]) - 1)
        elif lower == b"content-encoding" and value.lower() != b"identity" and self._stream is not None:
            self._stream.fail(ProviderFailed(), ProviderSignal.FAILED)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and (stream := self._stream) is not None and not self._ended:
            stream.start(status, self._retry_after)

    def on_message_complete(self) -> None:
        stream = self._stream
        if self._ended or (stream is not None and not stream.status):  # surplus, or a 1xx
            return
        self._ended = True
        self._reusable = self._parser.should_keep_alive()
        if stream is not None:
            # Data that arrives after the end of the message is not part of the answer.
            stream.answer.received = self.received.copy()
            self.received.clear()
            stream.answer.eof = True


def read_retry_after(value: bytes, *, in_ms: bool = False) -> float | None:
    """Returns the seconds that the header names, as a number or a date; None if it is neither."""
    text = value.decode("latin-1").strip()
    with contextlib.suppress(ValueError, OverflowError):
        if _SECONDS.fullmatch(text):
            return float(text) / (1000 if in_ms else 1)
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    return None
