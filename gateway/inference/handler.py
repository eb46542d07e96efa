"""The hot path: verify, admit, relay, settle.

A bare ASGI handler in front of the framework. The order of the outcomes is the interface's: availability, app,
origin, token, the app's rate, the user's rate, the reservation, the body. So the body is read and judged before
admission, because its size prices the reservation, but its fault is told last.

Failure policy: whatever cannot be known refuses the request. Money is settled once, whatever ends the request: at the
reported usage if there is one; at nothing if the provider failed before it produced anything; at the bound otherwise.
"""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import time
from functools import partial
from typing import Any

import msgspec
import structlog

from gateway.accounts.records import SLUG, App
from gateway.accounts.registry import Registry
from gateway.errors import (
    AppNotFound,
    Headers,
    InferenceDisabled,
    MethodNotAllowed,
    MultimodalUnsupported,
    OriginNotAllowed,
    ProviderFailed,
    ProviderUnreachable,
    RequestMalformed,
    RequestTooLarge,
    ServiceError,
    TokenInvalid,
    TokenMissing,
)
from gateway.ids import request_id
from gateway.inference import cors
from gateway.inference.admission import Admission, Reservation
from gateway.inference.availability import Availability, Seen
from gateway.inference.doors import NATIVE, Ask, Door, OpenAI, finish_reason, native_ask, openai_ask
from gateway.inference.prices import PRICED_ON, PRICES, cost, worst_case
from gateway.inference.provider import Choice, Gone, Interrupted, Provider, Stream
from gateway.inference.users import Users
from gateway.log import RequestLine, request_line
from gateway.server import BoundedProtocol
from gateway.settings import Settings
from gateway.telemetry.counters import Counters
from gateway.telemetry.metrics import Metrics

log = structlog.get_logger()

BODY_LIMIT = 102_400  # bytes
BODY_SECONDS = 30.0
WHOLE_LIMIT = 1_048_576  # characters of an answer that is not streamed
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
METHODS = {"ai": b"POST", "ai/chat/completions": b"POST", "ai/models": b"GET"}


class Call:
    """One request: what its log line and its answer need."""

    __slots__ = (
        "account",
        "app",
        "authorization",
        "began",
        "code",
        "connection",
        "door",
        "first",
        "headers",
        "model",
        "nano_euro",
        "origin",
        "receive",
        "request_id",
        "send",
        "status",
        "stream",
        "wants_stream",
    )

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.receive, self.send = receive, send
        self.connection: BoundedProtocol | None = scope["state"].get("connection") if "state" in scope else None
        self.request_id = request_id()
        self.began = time.perf_counter()
        self.first: float | None = None
        self.status, self.code = 0, ""
        self.account = self.app = self.model = self.door = ""
        self.nano_euro = 0
        self.wants_stream = False
        self.stream: Stream | None = None
        self.origin: bytes | None = None
        self.authorization: bytes | None = None
        self.headers: Headers = [(b"x-request-id", self.request_id.encode())]

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": self.headers + headers})

    async def body(self, body: bytes, more: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def answer(self, body: bytes, content_type: bytes = b"application/json") -> None:
        await self.start(
            200,
            [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                (b"cache-control", b"no-store"),
            ],
        )
        await self.body(body)

    async def refuse(self, error: ServiceError) -> None:
        self.code = error.code
        headers, body = error.render(self.request_id)
        await self.start(error.status, headers)
        await self.body(body)


class Inference:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        users: Users,
        admission: Admission,
        provider: Provider,
        availability: Availability,
        metrics: Metrics,
        counters: Counters,
    ) -> None:
        self._settings, self._registry, self._users = settings, registry, users
        self._admission, self._provider, self._availability = admission, provider, availability
        self._metrics, self._counters = metrics, counters

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call = Call(scope, receive, send)
        try:
            await self._handle(call, scope)
        except ServiceError as error:
            await call.refuse(error)
        except Gone:
            call.code = "CLIENT_GONE"
        except Exception as error:
            log.error("request.crashed", request_id=call.request_id, error=_where(error))
            if call.status:
                raise RuntimeError("the stream broke") from None  # the server closes the connection
            await call.refuse(ServiceError())
        finally:
            self._report(call)

    async def _handle(self, call: Call, scope: Any) -> None:
        name, _, rest = scope["path"].removeprefix("/capsule/").partition("/")
        content_type, length, encoding = self._read_headers(call, scope)
        if rest not in METHODS:
            return await self._not_found(call, name)
        available, app = await self._look_up(call, name)
        if scope["method"] == "OPTIONS" and call.origin is not None:
            return await self._preflight(call, app, scope, METHODS[rest])
        if app is not None and rest != "ai/models":
            call.account = app.account
        if not available:
            raise InferenceDisabled
        if app is None:
            raise AppNotFound
        if call.origin is not None and not cors.allowed(self._settings, app, call.origin):
            raise OriginNotAllowed
        if scope["method"].encode() != METHODS[rest]:
            raise MethodNotAllowed(METHODS[rest].decode(), "OPTIONS")

        user = await self._verify(call, app)
        if rest == "ai/models":
            return await call.answer(MODELS)

        call.door = "native" if rest == "ai" else "openai"
        asked: Ask | ServiceError
        try:
            body = await _read_body(call, content_type, length, encoding)
            asked = (native_ask if rest == "ai" else openai_ask)(body, call.wants_stream)
        except ServiceError as fault:
            asked = fault
        account = await self._registry.account_of(app)
        if account is None:
            raise AppNotFound
        bound = worst_case(asked.model, asked.text_bytes, asked.max_tokens) if isinstance(asked, Ask) else 0
        admitted = await self._admission.admit(app, account, user, bound)
        call.headers += admitted.headers
        if isinstance(asked, ServiceError):
            raise asked
        assert admitted.reservation is not None
        call.model = asked.model
        door: Door = NATIVE if rest == "ai" else OpenAI(call.request_id, asked.model, asked.with_usage)
        await self._relay(call, door, asked, admitted.reservation)

    # -- before admission ------------------------------------------------------------------------------------

    @staticmethod
    def _read_headers(call: Call, scope: Any) -> tuple[bytes | None, bytes | None, bytes | None]:
        content_type = length = encoding = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                # Two credentials are none: which one was meant cannot be known.
                call.authorization = value if call.authorization is None else b"several"
            elif name == b"origin":
                call.origin = value if call.origin is None else b"several"
            elif name == b"content-type":
                content_type = value if content_type is None else b"several"
            elif name == b"content-length":
                length = value
            elif name == b"accept":
                call.wants_stream = call.wants_stream or b"text/event-stream" in value.lower()
            elif name == b"content-encoding":
                encoding = value
        return content_type, length, encoding

    async def _look_up(self, call: Call, name: str) -> tuple[bool, App | None]:
        """Availability first; while it is off, the app is looked up for its CORS headers only."""
        available = self._availability.status().available
        app = None
        try:
            if SLUG.fullmatch(name):
                app = await self._registry.app(name)
                call.app = name if app is not None else ""
        except ServiceError:
            if available:
                raise
        if call.origin is not None:
            if app is not None and cors.allowed(self._settings, app, call.origin):
                call.headers += cors.readable(call.origin)
            else:
                call.headers.append(cors.VARY)
        return available, app

    async def _preflight(self, call: Call, app: App | None, scope: Any, methods: bytes) -> None:
        if app is None:
            raise AppNotFound
        assert call.origin is not None
        if not cors.allowed(self._settings, app, call.origin):
            raise OriginNotAllowed
        asked = next((v for n, v in scope["headers"] if n == b"access-control-request-headers"), None)
        call.headers = [call.headers[0], *cors.preflight(call.origin, asked, methods)]
        await call.start(204, [])
        await call.body(b"")

    async def _not_found(self, call: Call, name: str) -> None:
        with contextlib.suppress(ServiceError):
            await self._look_up(call, name)
        call.code = "NOT_FOUND"
        await call.start(404, NOT_FOUND_HEADERS)
        await call.body(NOT_FOUND)

    async def _verify(self, call: Call, app: App) -> str:
        if call.authorization is None:
            raise TokenMissing
        if call.authorization == b"several":
            raise TokenInvalid
        scheme, _, token = call.authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not (token := token.strip()):
            raise TokenMissing
        return await self._users.verify(app, token)

    # -- after admission -------------------------------------------------------------------------------------

    async def _relay(self, call: Call, door: Door, ask: Ask, reservation: Reservation) -> None:
        """From here on the reservation is ours to end, on every way out."""
        owed = 0  # what to settle at; nothing until the request was sent
        stream: Stream | None = None
        watcher: asyncio.Task[None] | None = None
        failure: ServiceError | None = None
        text: list[str] = []
        reasoning: list[str] = []
        forward = None if call.connection is None else partial(_forward, call.connection, door)
        try:
            connection = await self._provider.connect()
            # The file acts at once: between its first look and this one a body was read and a token checked.
            if self._availability.emergency_off():
                self._provider.keep(connection)
                raise InferenceDisabled
            owed = reservation.bound
            call.stream = stream = connection.post(ask.payload)
            watcher = self._watch(call, stream)
            while (choices := await stream.read()) is not None:
                if not ask.stream:
                    if stream.produced > WHOLE_LIMIT:
                        raise ProviderFailed
                    _collect(choices, text, reasoning)
                    continue
                out = door.chunks(choices) if choices else door.keep_alive
                if out:
                    if not call.status:
                        await call.start(200, STREAM_HEADERS)
                    if call.first is None and choices:
                        call.first = time.perf_counter()
                    stream.forward = None
                    await call.body(out, more=True)
                    stream.unsent = 0.0
                    stream.forward = forward
        except ServiceError as error:
            failure = error
            if stream is None or not (stream.produced or isinstance(error, Interrupted)):
                owed = 0
            if isinstance(error, ProviderUnreachable) and stream is None:
                self._availability.see(Seen.FAILED)
        finally:
            if watcher is not None:
                watcher.cancel()
            elif call.connection is not None:
                call.connection.on_lost = None
            if stream is not None:
                stream.close()
                self._learn(stream, failure)
                if stream.usage is not None:
                    owed = self._price(stream, ask, reservation)
                elif owed:
                    self._metrics.anomalies.labels("no usage").inc()
            call.nano_euro = owed
            # Told only when it is written, so that who reads the end of an answer can read its cost.
            await self._admission.settle(reservation, owed)
        if failure is not None:
            if failure.code.startswith("PROVIDER_"):
                self._metrics.provider_errors.labels(failure.code).inc()
            if not call.status:
                raise failure
            call.code = failure.code
            return await call.body(door.error(failure))
        assert stream is not None
        model = stream.model if stream.model in PRICES else ask.model
        finish = finish_reason(stream.finish)
        if not ask.stream:
            return await call.answer(door.whole("".join(text), "".join(reasoning), model, finish, stream.usage))
        if not call.status:
            await call.start(200, STREAM_HEADERS)
        await call.body(door.end(model, finish, stream.usage))

    @staticmethod
    def _watch(call: Call, stream: Stream) -> asyncio.Task[None] | None:
        """The browser leaving ends the stream: by a callback, or under another server by a task."""
        if call.connection is None:
            return asyncio.create_task(_disconnected(call.receive, stream))
        call.connection.on_lost = partial(stream.abandon, Gone())
        if call.connection.transport.is_closing():
            stream.abandon(Gone())
        return None

    def _price(self, stream: Stream, ask: Ask, reservation: Reservation) -> int:
        assert stream.usage is not None
        model = stream.model if stream.model in PRICES else ask.model
        price = cost(model, stream.usage)
        if price > reservation.bound:
            self._metrics.anomalies.labels("above bound").inc()
            return reservation.bound
        return price

    def _learn(self, stream: Stream, failure: ServiceError | None) -> None:
        if stream.seen is not None:
            self._availability.see(stream.seen)
        elif isinstance(failure, ProviderFailed) and stream.status in (401, 403):
            self._availability.doubt_credential()

    def _report(self, call: Call) -> None:
        """One line and one count a request; never content."""
        now = time.perf_counter()
        stream = call.stream
        usage = stream.usage if stream is not None else None
        self._metrics.request(call.door, call.status, call.code).inc()
        if call.model:
            ttft, duration, tokens_in, tokens_out = self._metrics.model(call.model)
            duration.observe(now - call.began)
            if call.first is not None:
                ttft.observe(call.first - call.began)
            if usage is not None:
                tokens_in.observe(usage.input)
                tokens_out.observe(usage.output)
        if call.account or call.code:  # neither a preflight nor the list of models
            ttft_seconds = None if call.first is None else call.first - call.began
            self._counters.request(call.account, call.code, ttft_seconds, usage, call.nano_euro)
        request_line(
            RequestLine(
                request_id=call.request_id,
                app=call.app,
                door=call.door,
                model=call.model,
                status=call.status,
                code=call.code,
                input_tokens=usage.input if usage else None,
                output_tokens=usage.output if usage else None,
                nano_euro=call.nano_euro,
                ttft_ms=None if call.first is None else round((call.first - call.began) * 1000, 1),
                duration_ms=round((now - call.began) * 1000, 1),
            )
        )


NOT_FOUND = b"Not Found"
NOT_FOUND_HEADERS: Headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"9")]


def _models() -> bytes:
    created = calendar.timegm(time.strptime(PRICED_ON, "%Y-%m-%d"))
    models = [{"id": m, "object": "model", "created": created, "owned_by": "capsule"} for m in PRICES]
    return msgspec.json.encode({"object": "list", "data": models})


MODELS = _models()


def _collect(choices: Any, text: list[str], reasoning: list[str]) -> None:
    for choice in choices:
        if choice.delta.content:
            text.append(choice.delta.content)
        if thought := choice.delta.reasoning_content or choice.delta.reasoning:
            reasoning.append(thought)


def _forward(connection: BoundedProtocol, door: Door, stream: Stream, choices: list[Choice]) -> bool:
    out = door.chunks(choices)
    if out:
        if not connection.write_chunk(out):
            return False
        stream.unsent = 0.0
    return True


async def _disconnected(receive: Any, stream: Stream) -> None:
    """The browser leaving is the only message that can still come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abandon(Gone())


async def _read_body(call: Call, content_type: bytes | None, length: bytes | None, encoding: bytes | None) -> bytes:
    """At most BODY_LIMIT bytes. Raises the body's fault, or Gone."""
    if content_type is not None:
        kind = content_type.partition(b";")[0].strip().lower()
        if kind.startswith(MEDIA_TYPES):
            raise MultimodalUnsupported
        if kind != b"application/json":
            raise RequestMalformed("Send the body as 'Content-Type: application/json'.")
    if encoding is not None and encoding.lower() != b"identity":
        raise RequestMalformed("Send the body as it is, without a Content-Encoding.")
    if length is not None and (not length.isdigit() or int(length) > BODY_LIMIT):
        raise RequestTooLarge
    if call.connection is not None and not call.connection.uploading:
        return await _whole_body(call)  # all of it is here: nothing to wait for
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _whole_body(call)
    except TimeoutError:
        raise RequestMalformed(f"The body did not arrive within {BODY_SECONDS:.0f} seconds.") from None


async def _whole_body(call: Call) -> bytes:
    body = b""
    while True:
        message = await call.receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part: bytes = message["body"]
        body = body + part if body else part
        if len(body) > BODY_LIMIT:
            raise RequestTooLarge
        if not message.get("more_body"):
            return body


def _where(error: BaseException) -> str:
    """The kind of an error and the line it came from: its message could hold content."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
    return type(error).__name__ + where
