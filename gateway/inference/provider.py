"""The model provider: an OpenAI-compatible HTTP/1.1 client made for relaying streams.

A Connection is the wire: llhttp's parser on an asyncio protocol, kept alive in one pool. A Stream is one exchange on
it. What arrives is kept as bytes until the relay asks, so that what came together is split, decoded and sent on
together; past HIGH_WATER the provider is no longer read, so that a browser that stops reading holds it back.

All streams share one sweep that counts their silence, instead of a timer for each: the token path never touches a
clock. A request is sent once: where a byte of it may have reached the provider there is no second attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import httpx
import msgspec

from gateway.errors import (
    BackboneUnavailable,
    ProviderFailed,
    ProviderQuotaExhausted,
    ProviderTimeout,
    ProviderUnreachable,
    ServiceError,
)
from gateway.inference.availability import Seen, usable_url
from gateway.inference.prices import Usage
from gateway.settings import Settings

HIGH_WATER = 65_536  # unread bytes of one stream above which the provider is held back
EVENT_LIMIT = 1_048_576  # bytes of one event
HEAD_LIMIT = 65_536  # bytes of an answer before its body
TICK = 0.1  # seconds between sweeps
IDLE_CONNECTION = 15.0  # seconds a connection is kept without a request
IDLE_CONNECTIONS = 2_048
DRAIN_TAIL = 1.0  # seconds that the end of an answered message may take
PROBE_BUDGET = 10.0  # seconds


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    model: str | None = None
    usage: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class ReportedUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


_chunk = msgspec.json.Decoder(Chunk)
_usage = msgspec.json.Decoder(ReportedUsage)
_QUOTA = re.compile(rb"quota|billing|insufficient|credit|payment", re.IGNORECASE)
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Gone(Exception):
    """The reader left: the stream ends without anybody to tell."""


class Interrupted(BackboneUnavailable):
    message = "The service restarted before the answer was complete; ask again."


def classify(status: int, body: bytes, retry_after: float | None = None) -> tuple[ServiceError, Seen | None]:
    """The answer for a provider's error status, and what it shows of the provider (None: ask it again)."""
    if status == 402 or (status == 429 and _QUOTA.search(body)):
        return ProviderQuotaExhausted(), Seen.QUOTA
    if status == 429:
        return ProviderQuotaExhausted(retry_after=retry_after or 5), Seen.REACHED
    if status in (401, 403):
        return ProviderFailed(), None
    return ProviderFailed(), Seen.FAILED if status >= 500 else Seen.REACHED


def error_status(body: bytes) -> int:
    """The status inside an error event, nested or flat; 500 when it names none."""
    try:
        found = msgspec.json.decode(body)
        found = found.get("error", found) if isinstance(found, dict) else {}
        for name in ("code", "status", "status_code"):
            value = found.get(name) if isinstance(found, dict) else None
            if str(value).isdigit() and 400 <= int(str(value)) <= 599:
                return int(str(value))
    except _BAD:
        pass
    return 500


class Stream:
    """One request and its answer. `read` until it gives None or raises."""

    __slots__ = (
        "_connection",
        "_due",
        "_ended",
        "_failure",
        "_held",
        "_quiet",
        "_raw",
        "_rest",
        "_size",
        "_waiter",
        "age",
        "done",
        "finish",
        "forward",
        "model",
        "produced",
        "provider",
        "seen",
        "status",
        "unsent",
        "usage",
        "wire_bytes",
    )

    def __init__(self, provider: Provider, connection: Connection) -> None:
        self.provider = provider
        self._connection: Connection | None = connection
        self._raw: list[bytes] = []
        self._rest = b""
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._held: list[Choice] | None = None  # what `forward` would not take
        # The short way: takes choices as they arrive, while the relay waits in `read`. False: they have to wait.
        self.forward: Callable[[Stream, list[Choice]], bool] | None = None
        self._ended = False  # the HTTP message is complete
        self._due = False  # a keep-alive is due
        self._quiet = 0.0  # seconds since the provider's last byte
        self.age = 0.0  # seconds
        self.unsent = 0.0  # seconds since the relay last sent something
        self.status = 0  # 0 until the headers are there
        self.wire_bytes = False  # any byte of an answer arrived
        self.produced = 0  # characters; from the first on somebody pays for them
        self.done = False  # the answer is complete
        self.finish: str | None = None
        self.model: str | None = None
        self.usage: Usage | None = None
        self.seen: Seen | None = None  # what this exchange showed of the provider

    async def read(self) -> list[Choice] | None:
        """What arrived since the last call, in one list; [] when a keep-alive is due; None after the end."""
        while True:
            if self._held is not None:
                held, self._held = self._held, None
                return held
            if self._raw and self.status == 200:
                if choices := self._parse():
                    return choices
                continue
            if self.done:
                self.seen = Seen.COMPLETION
                return None
            if self._failure is not None:
                raise self._failure
            if self._ended:
                self._end()
                continue
            if self._due:
                self._due = False
                return []
            self._waiter = self.provider.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _end(self) -> None:
        if self.status != 200:
            self._refuse()
        elif self.finish is not None:
            self.done = True  # some providers leave out [DONE]
        else:
            self._fail(ProviderFailed(), Seen.FAILED)

    def _refuse(self) -> None:
        connection, body = self._connection, b"".join(self._raw)
        self._raw.clear()
        error, seen = classify(self.status, body, connection.retry_after if connection else None)
        self._fail(error, seen)

    def _parse(self) -> list[Choice]:
        data = self._raw[0] if len(self._raw) == 1 else b"".join(self._raw)
        if self._rest:
            data = self._rest + data
        self._raw.clear()
        self._size = 0
        connection = self._connection
        if connection is not None and connection.paused:
            connection.resume()
        if b"\r" in data:
            # A CR at the very end may be half of a CRLF: it waits for the next read.
            held = b"\r" if data.endswith(b"\r") and not self._ended else b""
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        events = data.split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > EVENT_LIMIT:
            self._fail(ProviderFailed(), None)
        if self._ended and self._rest:
            events.append(self._rest)
            self._rest = b""
        choices: list[Choice] = []
        for event in events:
            if self.done or self._failure is not None:
                break
            if event.startswith(b"data: ") and b"\n" not in event:
                self._event(event[6:], choices)
            elif content := _data_of(event):
                self._event(content, choices)
        return choices

    def _event(self, content: bytes, choices: list[Choice]) -> None:
        if content == b"[DONE]":
            self.done = True
            return None
        if len(content) > EVENT_LIMIT:
            return self._fail(ProviderFailed(), None)
        try:
            chunk = _chunk.decode(content)
        except _BAD:
            return self._fail(ProviderFailed(), None)
        if chunk.choices:
            choice = chunk.choices[0]
            delta = choice.delta
            if delta is not None and (size := len(delta.content or delta.reasoning_content or delta.reasoning or "")):
                self.produced += size
                choices.append(choice)
            if choice.finish_reason is not None:
                self.finish = choice.finish_reason
        if self.model is None:
            self.model = chunk.model
        if chunk.usage:
            self._note_usage(chunk.usage)
        if chunk.error and bytes(chunk.error) != b"null":
            self._fail(*classify(error_status(content), content))
        elif chunk.choices is None and not chunk.usage and b'"message"' in content:
            self._fail(*classify(error_status(content), content))  # a flat error object
        return None

    def _note_usage(self, raw: msgspec.Raw) -> None:
        # The last report counts; nonsense (negative, not whole) is none at all.
        if bytes(raw) == b"null":
            return
        self.usage = None
        with contextlib.suppress(*_BAD):
            reported = _usage.decode(raw)
            if reported.prompt_tokens >= 0 and reported.completion_tokens >= 0:
                self.usage = Usage(reported.prompt_tokens, reported.completion_tokens)

    # -- from the wire ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        if (waiter := self._waiter) is not None and not waiter.done():
            waiter.set_result(None)

    def arrived(self) -> None:
        """After each read from the wire: passes on what came, or wakes the relay."""
        if self.forward is not None and self._waiter is not None and self._raw and self._held is None:
            choices = self._parse()
            if choices and not self.forward(self, choices):
                self._held = choices
            elif not (self.done or self._ended or self._failure is not None):
                return
        self.wake()

    def take(self, body: bytes) -> None:
        self._raw.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER:
            if self.status != 200:
                self._refuse()
            elif (connection := self._connection) is not None and not connection.paused:
                connection.pause()

    def complete(self) -> None:
        self._ended = True

    def lost(self) -> None:
        self._connection = None
        if not self.wire_bytes:
            self._fail(ProviderUnreachable(), Seen.FAILED)
        elif self.status not in (0, 200):
            self._refuse()
        elif not self._ended:
            self._fail(ProviderFailed(), Seen.FAILED)
        self.wake()

    def _fail(self, error: Exception, seen: Seen | None) -> None:
        if self._failure is None:
            self._failure = error
            self.seen = seen
        self.wake()

    # -- from the sweep and the relay ------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        limits = self.provider.timeouts
        self.age += seconds
        self.unsent += seconds
        connection = self._connection
        if connection is not None and not connection.paused and not self._ended:
            self._quiet += seconds
            if self._quiet >= (limits.idle if self.status else limits.first):
                self._fail(ProviderTimeout(), None)
        if self.age >= limits.total:
            self._fail(ProviderTimeout(), None)
        if self.unsent >= self.provider.keep_alive:
            self.unsent = 0.0
            self._due = True
            self.wake()

    def abandon(self, reason: Exception) -> None:
        """Ends it from our side: the reader left, or the drain is over."""
        self._fail(reason, self.seen)

    def close(self) -> None:
        """Gives the connection back if the answer was read to its end; otherwise closes it, which cancels."""
        self.provider.streams.discard(self)
        if (connection := self._connection) is not None:
            self._connection = None
            connection.stream = None
            if self._ended and connection.reusable:
                self.provider.keep(connection)
            elif self.done and not self._ended:
                self.provider.drain(connection)
            else:
                connection.transport.abort()


def _data_of(event: bytes) -> bytes:
    """The data lines of one event, joined; comments and other fields are left out."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Connection(asyncio.Protocol):
    __slots__ = (
        "ended",
        "framed",
        "head_bytes",
        "idle",
        "parser",
        "paused",
        "provider",
        "retry_after",
        "reusable",
        "spoiled",
        "stream",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.stream: Stream | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.paused = False
        self.reusable = False
        self.ended = False  # the answer was read to its end
        self.spoiled = False  # more came than was asked for: whose answer that is cannot be known
        self.head_bytes = 0
        self.framed = False  # the answer says where it ends, so that a close before is a cut
        self.retry_after: float | None = None
        self.idle = 0.0

    def post(self, payload: bytes) -> Stream:
        """Sends the request, once."""
        self.stream = stream = Stream(self.provider, self)
        self.provider.streams.add(stream)
        self.reusable = self.framed = self.ended = False
        self.head_bytes = 0
        self.retry_after = None
        self.transport.write(b"%b%d\r\n\r\n%b" % (self.provider.head, len(payload), payload))
        return stream

    def pause(self) -> None:
        self.paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        self.transport.resume_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # uvloop's transports only look like asyncio's

    def data_received(self, data: bytes) -> None:
        stream = self.stream
        if stream is None:
            self.provider.tail(self, data)
            return None
        stream.wire_bytes = True
        stream._quiet = 0.0
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            stream._fail(ProviderFailed(), None)
            return None
        if not stream.status:
            self.head_bytes += len(data)
            if self.head_bytes > HEAD_LIMIT:
                return stream._fail(ProviderFailed(), None)
        stream.arrived()

    def connection_lost(self, exc: Exception | None) -> None:
        if (stream := self.stream) is not None:
            self.stream = None
            if stream.status == 200 and not self.framed:
                stream.complete()
            stream.lost()
        else:
            self.provider.forget(self)

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        if self.ended:
            self.spoiled = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.spoiled:
            return
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self.framed = True
        elif lower == b"retry-after" and value.isdigit():
            self.retry_after = min(float(value), 3600.0)
        elif lower == b"content-encoding" and value.lower() != b"identity" and self.stream is not None:
            self.stream._fail(ProviderFailed(), None)

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200 and (stream := self.stream) is not None and not self.spoiled:
            stream.status = status

    def on_body(self, body: bytes) -> None:
        if (stream := self.stream) is not None and not self.spoiled:
            stream.take(body)

    def on_message_complete(self) -> None:
        stream = self.stream
        if stream is None or stream.status:  # not a 1xx
            self.ended = True
            self.reusable = self.parser.should_keep_alive()
            if stream is not None:
                stream.complete()


class Provider:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.timeouts = settings.provider_timeouts
        self.keep_alive = settings.keep_alive
        self.streams: set[Stream] = set()
        self._idle: deque[Connection] = deque()
        self._draining: set[Connection] = set()  # answered, but the end of the message is still to come
        self._tls = httpx.create_ssl_context(trust_env=False)
        if settings.ca_file:
            self._tls.load_verify_locations(settings.ca_file)
        self.head = b""
        self._key = ""
        self.read_key()

    # -- the credential --------------------------------------------------------------------------------------

    def read_key(self) -> None:
        """From the settings or their file; again after a refusal, so that a replaced key heals by itself."""
        key = self._settings.provider_key
        if self._settings.provider_key_file:
            try:
                key = Path(self._settings.provider_key_file).read_text().strip()
            except (OSError, UnicodeDecodeError):
                key = ""
        self._key = key if re.fullmatch(r"[\x21-\x7e]+", key) else ""
        if usable_url(self._settings.provider_url):
            parts = urlsplit(self._settings.provider_url)
            self.head = (
                f"POST {parts.path.rstrip('/')}/chat/completions HTTP/1.1\r\n"
                f"host: {parts.netloc.rpartition('@')[2]}\r\n"
                f"authorization: Bearer {self._key}\r\n"
                "content-type: application/json\r\n"
                "accept: text/event-stream\r\n"
                "accept-encoding: identity\r\n"
                "user-agent: capsule-gateway\r\n"
                "content-length: "
            ).encode()

    def has_key(self) -> bool:
        return bool(self._key)

    # -- connections -----------------------------------------------------------------------------------------

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def connect(self) -> Connection:
        """A connection that nothing was sent on yet. Raises ProviderUnreachable."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        parts = urlsplit(self._settings.provider_url)
        secure = parts.scheme == "https"
        try:
            async with asyncio.timeout(self.timeouts.connect):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self),
                    parts.hostname or "",
                    parts.port or (443 if secure else 80),
                    ssl=self._tls if secure else None,
                )
        except (OSError, ssl.SSLError, TimeoutError) as error:
            raise ProviderUnreachable from error
        return connection

    def keep(self, connection: Connection) -> None:
        if connection.spoiled or connection.transport.is_closing() or len(self._idle) >= IDLE_CONNECTIONS:
            connection.transport.abort()
            return
        if connection.paused:
            connection.resume()
        connection.idle = 0.0
        self._idle.append(connection)

    def drain(self, connection: Connection) -> None:
        if connection.paused:
            connection.resume()
        connection.idle = 0.0
        self._draining.add(connection)

    def tail(self, connection: Connection, data: bytes) -> None:
        """What a connection without a stream receives: the end of an answer, or something nobody asked for."""
        with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            if connection in self._draining:
                connection.parser.feed_data(data)
                if not connection.reusable:
                    return None
                self._draining.discard(connection)
                return self.keep(connection)
        connection.transport.abort()

    def forget(self, connection: Connection) -> None:
        self._draining.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    # -- as long as the process ------------------------------------------------------------------------------

    async def sweep(self, count: Callable[[float], None]) -> None:
        """Counts every stream's silence, and closes connections that nobody used for a while."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(TICK)
            now = loop.time()
            passed, before = now - before, now
            count(len(self.streams))
            for stream in list(self.streams):
                stream.tick(passed)
            for connection in list(self._idle):
                connection.idle += passed
                if connection.idle >= IDLE_CONNECTION:
                    connection.transport.abort()
            for connection in list(self._draining):
                connection.idle += passed
                if connection.idle >= DRAIN_TAIL:
                    connection.transport.abort()

    def interrupt(self) -> None:
        """Ends every stream at once: this process has to go."""
        for stream in list(self.streams):
            stream.abandon(Interrupted())

    def close(self) -> None:
        for connection in [*self._idle, *self._draining]:
            connection.transport.abort()

    async def probe(self) -> Seen:
        """One GET /models."""
        self.read_key()
        try:
            async with (
                asyncio.timeout(PROBE_BUDGET),
                httpx.AsyncClient(verify=self._tls, trust_env=False) as client,
                client.stream(
                    "GET",
                    f"{self._settings.provider_url}/models",
                    headers={"authorization": f"Bearer {self._key}"},
                ) as answer,
            ):
                status = answer.status_code
        except (httpx.HTTPError, OSError, TimeoutError):
            return Seen.FAILED
        if status in (401, 403):
            return Seen.REFUSED
        if status == 402:
            return Seen.QUOTA
        return Seen.FAILED if status >= 500 else Seen.REACHED
