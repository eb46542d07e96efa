"""The hot path: verify, admit, relay, settle.

This is a bare ASGI handler in front of the framework. It checks in this order, which the API documents: availability,
app, suspension, origin, token, the app's rate, the user's rate, the reservation, the body. The size of the body
determines the reservation, so the body is read before admission, but a fault of the body is reported last.

Failure policy: if a check cannot be completed, the request is refused. Money is settled once, however the request ends
(see `_charge_for`).
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import structlog

from gateway.accounts.records import SLUG, Account, App, find_suspension
from gateway.accounts.registry import Registry
from gateway.errors import (
    PROVIDER_FAULT_CODES,
    AppNotFound,
    AppSuspended,
    Headers,
    InferenceDisabled,
    MethodNotAllowed,
    ModelNotAllowed,
    NotFound,
    OriginNotAllowed,
    ProviderFailed,
    ServiceError,
    TokenInvalid,
    TokenMissing,
)
from gateway.inference import cors
from gateway.inference.auth.trial_tokens import is_test_token
from gateway.inference.auth.users import Users
from gateway.inference.availability import Availability
from gateway.inference.backlog import ANSWER_BYTES, Backlog, Backlogs
from gateway.inference.formats.completion import CompletionRequest, Format, FullAnswer
from gateway.inference.formats.endpoints import ENDPOINTS, Endpoint
from gateway.inference.formats.openai import list_models
from gateway.inference.provider.connection import ClientGone, Interrupted, Stream
from gateway.inference.request import DUPLICATE, InferenceRequest
from gateway.inference.spend.admission import Admission, Reservation
from gateway.inference.traces import SETTLE, RequestTraces
from gateway.inference.upstream import Exchange, Upstream
from gateway.log import RequestLine, origin_of, write_request_line
from gateway.settings import Settings
from gateway.settings.prices import (
    NOTHING,
    Charge,
    Tariff,
    Usage,
    charge_for_usage,
    choice_of,
    worst_case_cost,
)
from gateway.telemetry import tracing
from gateway.telemetry.counters import Counters
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.usage import RequestDetails

logger = structlog.get_logger()

FULL_ANSWER_CHARACTERS = 1_048_576  # of an answer that is not streamed
NOT_FOUND = b"Not Found"
NOT_FOUND_HEADERS: Headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"9")]


def methods_of(models: Iterable[str]) -> dict[str, bytes]:
    """Returns the method of each route below an app's address."""
    return dict.fromkeys(ENDPOINTS, b"POST") | {f"ai/{path}": b"GET" for path in list_models(models)}


class Inference:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        users: Users,
        admission: Admission,
        upstream: Upstream,
        availability: Availability,
        metrics: Metrics,
        counters: Counters,
    ) -> None:
        self._settings, self._registry, self._users = settings, registry, users
        self._admission, self._upstream, self._availability = admission, upstream, availability
        self._metrics, self._counters = metrics, counters
        self._models = {f"ai/{path}": body for path, body in list_models(upstream.providers.models).items()}
        self._methods = methods_of(upstream.providers.models)
        self._backlogs = Backlogs()
        tracer = tracing.tracer()
        self._traces = None if tracer is None else RequestTraces(tracer, self._methods, upstream.providers.models)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = InferenceRequest(scope, receive, send)
        if self._traces is not None:
            request.trace = self._traces.begin(request, scope["headers"])
        try:
            await self._handle(request)
        except ServiceError as error:
            request.limits = request.limits or error.limits
            await request.refuse(error)
        except ClientGone:
            request.code = "CLIENT_GONE"
        except Exception as error:
            logger.error("request.crashed", request_id=request.request_id, error=origin_of(error))
            if request.status:
                request.trace.fail("INTERNAL")
                raise RuntimeError("the stream broke") from None  # the server closes the connection
            await request.refuse(ServiceError())
        finally:
            self._report(request)

    async def _handle(self, request: InferenceRequest) -> None:
        """Checks the route, availability, the app and its origin, then the token."""
        name, _, route = request.path.removeprefix("/capsule/").partition("/")
        if route not in self._methods:
            return await self._not_found(request, name, route)
        changes = self._registry.cache.changes
        available, app = await self._find_app(request, name)
        # While inference is off, a page of the app may still ask, so that it can read why.
        if request.method == "OPTIONS" and (available or (request.origin is not None and request.origin_allowed)):
            return await self._preflight(request, app, self._methods[route])
        if app is not None and route not in self._models:
            request.account = app.account
        if not available:
            raise InferenceDisabled
        if app is None:
            raise AppNotFound
        account = await self._registry.account_of(app)
        if find_suspension(app, account) is not None:
            raise AppSuspended
        if not request.origin_allowed:
            raise OriginNotAllowed
        if request.method.encode() != self._methods[route]:
            raise MethodNotAllowed(self._methods[route].decode(), "OPTIONS")

        request.trace.enter("verify")
        if route in self._models:
            await self._users.verify(app, _bearer_token(request.authorization))
            return await request.answer(self._models[route])
        await self._complete(request, app, account, changes, ENDPOINTS[route])

    async def _complete(
        self, request: InferenceRequest, app: App, account: Account | None, changes: int, endpoint: Endpoint
    ) -> None:
        """Verifies the token, admits the request, relays its answer and settles its cost.

        `changes`: the number of changes of records before these were read.
        """
        user = await self._users.verify(app, _bearer_token(request.authorization))
        request.authorization = None
        request.format = endpoint.format
        request.trace.leave()
        completion = await self._read_completion_request(request, endpoint)
        if account is None:
            raise AppNotFound
        # Checked again because verifying the token and reading the body took time.
        cache = self._registry.cache
        if cache.changes != changes or not cache.is_current:
            await self._upstream.check_open(app)
        if isinstance(completion, CompletionRequest):
            request.model, request.max_tokens = completion.model, completion.max_tokens
        request.trace.enter("admit")
        admitted = await self._admission.admit(app, account, user, _max_cost_of(completion))
        request.headers += admitted.headers
        request.limits = admitted.limits
        request.trace.leave()
        if isinstance(completion, ServiceError):
            raise completion  # after admission, because a fault of the body must not mask a refusal
        assert admitted.reservation is not None
        request.admitted, request.reserved = True, admitted.reservation.max_cost
        backlog = Backlog(self._backlogs, account.id)
        try:
            await self._relay(request, completion, admitted.reservation, app, account, backlog)
        finally:
            backlog.clear()

    async def _read_completion_request(
        self, request: InferenceRequest, endpoint: Endpoint
    ) -> CompletionRequest | ServiceError:
        """Reads the body, and returns the request or the body's fault. Raises ClientGone."""
        try:
            completion = endpoint.read_completion_request(await request.read_body(), request.wants_stream)
        except ServiceError as fault:
            return fault
        models = self._upstream.providers.models
        if completion.model in models:
            return completion
        # Another name is the client's text, which nothing keeps.
        if completion.model in self._settings.tariffs[0].prices:
            request.model = completion.model
        return ModelNotAllowed(choice_of(models))

    # -- before the token ------------------------------------------------------------------------------------

    async def _find_app(self, request: InferenceRequest, name: str) -> tuple[bool, App | None]:
        """Returns whether inference is available, and the app. While it is off, only the CORS headers need the app."""
        available = self._availability.status().available
        app = None
        try:
            if SLUG.fullmatch(name):
                app = await self._registry.app(name)
                request.app = name if app is not None else ""
        except ServiceError:
            if available:
                raise
        if request.origin is None:
            request.origin_allowed = True
        elif app is not None and (
            cors.is_allowed(self._settings, app, request.origin) or self._is_test(request, request.origin)
        ):
            request.origin_allowed = True
            request.headers += cors.response_headers(request.origin)
        else:
            request.headers.append(cors.VARY)
        return available, app

    def _is_test(self, request: InferenceRequest, origin: bytes) -> bool:
        """Returns whether a page of the service asks with a test token. A preflight has no token yet."""
        if not cors.is_own(self._settings, origin, request.host):
            return False
        return request.method == "OPTIONS" or is_test_token((request.authorization or b"").partition(b" ")[2].strip())

    async def _preflight(self, request: InferenceRequest, app: App | None, methods: bytes) -> None:
        if app is None:
            raise AppNotFound
        if not request.origin_allowed:
            raise OriginNotAllowed
        if (origin := request.origin) is None:  # not a browser
            request.headers.append((b"allow", methods + b", OPTIONS"))
        else:
            request.headers = [request.headers[0], *cors.preflight_headers(origin, request.preflight_headers, methods)]
        await request.start(204, [])
        await request.send_body(b"")

    async def _not_found(self, request: InferenceRequest, name: str, route: str) -> None:
        app = None
        with contextlib.suppress(ServiceError):
            _, app = await self._find_app(request, name)
        if route.startswith("ai/"):
            if request.method == "OPTIONS" and request.origin is not None:  # so that the page can read the explanation
                return await self._preflight(request, app, b"GET, POST")
            raise NotFound(explain_missing(route.removeprefix("ai/"), self._upstream.providers.models))
        request.code = "NOT_FOUND"
        await request.start(404, NOT_FOUND_HEADERS)
        await request.send_body(NOT_FOUND)

    # -- from admission to settlement ------------------------------------------------------------------------

    async def _relay(
        self,
        request: InferenceRequest,
        completion: CompletionRequest,
        reservation: Reservation,
        app: App,
        account: Account,
        backlog: Backlog,
    ) -> None:
        """Relays the answer, and settles the reservation however the request ends.

        The permit is held until the answer has been read. Data that a slow client has not taken by then is sent later.
        """
        format = completion.make_format(request.request_id, completion.model)
        exchange = Exchange(self._upstream, request, completion, app, account, format)
        failure: ServiceError | None = None
        full, held = FullAnswer("", "", []), b""
        try:
            async with exchange as answering:
                if completion.stream:
                    held = await _relay_stream(request, completion, reservation, format, answering, backlog)
                else:
                    full = await _collect(answering)
        except ServiceError as error:
            failure = error
        finally:
            stream, model = request.stream, completion.model
            if stream is not None:
                model = _answering_model(completion, reservation, stream)
            charge = _charge_for(reservation, model, stream, exchange.billed)
            if charge.anomaly is not None:
                self._metrics.anomalies.labels(charge.anomaly).inc()
            request.nano_euro = charge.cost
            request.trace.enter(SETTLE)
            # Settled before the end is sent, so that a client that has the whole answer can read its cost.
            await self._admission.settle(reservation, charge.cost)
            request.trace.leave()
        if failure is not None:
            return await self._end_with_failure(request, format, failure)
        assert stream is not None
        answer = stream.answer
        if answer.unknown_finish:
            self._metrics.anomalies.labels("finish reason").inc()
        if answer.inconsistent_usage:
            self._metrics.anomalies.labels("token counts").inc()
        finish = "content_filter" if answer.refused and not format.names_refusals else answer.finish
        if not completion.stream:
            return await request.answer(format.full(full, model, finish, answer.usage), backlog)
        if held and request.first_token is None:
            request.first_token = time.perf_counter()
        while backlog:
            await request.stream_body(backlog.next_piece())
        await request.stream_body(held + format.end(model, finish, answer.usage), last=True)

    async def _end_with_failure(self, request: InferenceRequest, format: Format, failure: ServiceError) -> None:
        """Sends the failure as an event if the answer has begun, otherwise as a response with its own status."""
        if failure.code in PROVIDER_FAULT_CODES:
            self._metrics.provider_errors.labels(failure.code, request.model).inc()
        if not request.status:
            raise failure
        request.code = failure.code
        await request.stream_body(format.error(failure), last=True)

    def _report(self, request: InferenceRequest) -> None:
        """Counts the request, writes its log line without content, and ends its trace."""
        now = time.perf_counter()
        usage = request.stream.answer.usage if request.stream is not None else None
        ttft = None if request.first_token is None else request.first_token - request.began  # seconds
        line = RequestLine(
            request_id=request.request_id,
            app=request.app,
            format=request.format,
            model=request.model,
            status=request.status,
            code=request.code,
            input_tokens=usage.input if usage else None,
            output_tokens=usage.output if usage else None,
            nano_euro=request.nano_euro,
            # One decimal, without `round`, which takes six times as long to find it.
            ttft_ms=None if ttft is None else round(ttft * 10_000) / 10,
            duration_ms=round((now - request.began) * 10_000) / 10,
            provider_status=(request.stream.status or None) if request.stream is not None else None,
        )
        self._metrics.queue_request(line, admitted=request.admitted)
        if request.account or request.code:  # neither a preflight nor the list of models
            waited_ms = round(request.waited * 1000)
            details = RequestDetails(
                request.reason, request.reserved, waited_ms, request.limits, request.region, request.attempts
            )
            self._counters.count_request(request.account, line, details, admitted=request.admitted)
        write_request_line(line)
        if self._traces is not None:
            self._traces.finish(request)


def _bearer_token(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise TokenMissing
    if authorization == DUPLICATE:
        raise TokenInvalid
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not (token := token.strip()):
        raise TokenMissing
    return token


def _max_cost_of(completion: CompletionRequest | ServiceError) -> Callable[[Tariff], int] | None:
    """Returns what computes the maximum cost. A faulty request reserves nothing, but counts against the rates."""
    if isinstance(completion, ServiceError):
        return None
    return partial(worst_case_cost, completion.model, completion.text_bytes, completion.max_tokens)


def _charge_for(reservation: Reservation, model: str, stream: Stream | None, billed: Usage | None) -> Charge:
    """Returns the charge for a request that has ended: the price of the usage, at most the reservation's maximum cost.

    Without a known usage it is the maximum cost.
    """
    if stream is None:
        return NOTHING
    if billed is not None:
        return charge_for_usage(reservation.tariff.prices[model], billed, reservation.max_cost)
    if isinstance(stream.answer.failure, ClientGone | Interrupted | AppSuspended):
        return Charge(reservation.max_cost)  # the stream ended before the usage could arrive
    return Charge(reservation.max_cost, "no usage")


def _answering_model(completion: CompletionRequest, reservation: Reservation, stream: Stream) -> str:
    """Returns the model that the answer names and is charged for: the one that the provider reports, if it has a price.

    Otherwise it is the requested model.
    """
    model = stream.answer.model
    return model if model is not None and model in reservation.tariff.prices else completion.model


async def _relay_stream(
    request: InferenceRequest,
    completion: CompletionRequest,
    reservation: Reservation,
    format: Format,
    stream: Stream,
    backlog: Backlog,
) -> bytes:
    """Sends the chunks that `read` returns. Returns those that came with the end, so that they are sent with it.

    While this waits in `read`, data that arrives after the first token bypasses ASGI's coroutines. While the client
    does not read, data goes to the backlog. A client whose account has no room there is disconnected.
    """
    stream.format = format
    forward = None if request.connection is None else request.connection.write_chunk
    named = False
    while (deltas := await stream.read()) is not None:
        if deltas and not named:
            named = True
            format.name_model(_answering_model(completion, reservation, stream))
        out, stream.refused = stream.refused + format.chunks(deltas), b""
        if stream.answer.complete:
            return out
        if request.first_token is None and out:
            request.first_token = time.perf_counter()
        stream.forward = None
        if backlog or request.stalled:
            if not backlog.add(out):
                request.disconnect()
            while backlog and (not request.stalled or len(backlog) > ANSWER_BYTES):
                await request.stream_body(backlog.next_piece())
        elif out or not deltas:
            await request.stream_body(out or format.keep_alive())
            stream.unsent = 0.0
        if request.first_token is not None and not backlog:
            stream.forward = forward
    return b""


async def _collect(stream: Stream) -> FullAnswer:
    text, reasoning, refusal, calls = [], [], [], []
    while (deltas := await stream.read()) is not None:
        if stream.answer.produced > FULL_ANSWER_CHARACTERS:
            raise ProviderFailed
        for delta in deltas:
            if delta.content:
                text.append(delta.content)
            if thought := delta.reasoning_content or delta.reasoning:
                reasoning.append(thought)
            if delta.refusal:
                refusal.append(delta.refusal)
            if delta.tool_calls:
                calls += delta.tool_calls
    return FullAnswer("".join(text), "".join(reasoning), calls, "".join(refusal))


OFFERED = f"{', '.join(f'POST /{endpoint}' for endpoint in ENDPOINTS)}, GET /ai/models and GET /ai/models/<model>"
NOT_TEXT = ("audio", "embeddings", "files", "images", "moderations")


def explain_missing(path: str, models: Collection[str]) -> str:
    """Returns the message for `path`, the part after `/ai/`. The message does not repeat it."""
    first = path.partition("/")[0]
    if first == "v1":
        return "Leave out '/v1': the base URL ends with '/ai'."
    if f"ai/{path}".rstrip("/") in methods_of(models):
        return "Leave out the slash at the end of the address."
    if first == "responses":
        return "No answer is stored, so none can be read, continued, canceled or deleted; send the whole history again."
    if first == "completions":
        return "Completions of a bare prompt are not offered; use chat completions, at /ai/chat/completions."
    if first == "models":
        return choice_of(models)
    if first in NOT_TEXT:
        return f"Only text is generated here. The addresses are {OFFERED}."
    return f"There is nothing at this address. The addresses are {OFFERED}."
