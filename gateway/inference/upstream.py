"""The providers as the handler sees them: an `Exchange` for each request.

    async with Exchange(upstream, request, completion, app, account, format) as stream:
        while (deltas := await stream.read()) is not None: …

Entering chooses a provider, waits for a permit, sends the request, and returns once the answer has begun. If a provider
fails before the first token, the request goes to the next one: each gets it once at most, and nothing is sent again
after a token. Leaving ends the stream, gives the permit back, and reports what the exchange revealed about the
provider, however it ended. `billed` is then the usage for which the provider that answered bills: an attempt that
failed before any token costs nothing.
"""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType

import msgspec
import structlog

from gateway.accounts.records import Account, App, find_suspension
from gateway.accounts.registry import Registry
from gateway.errors import (
    PROVIDER_FAULT_CODES,
    AppNotFound,
    AppSuspended,
    BackboneUnavailable,
    InferenceDisabled,
    ProviderQuotaExhausted,
    ProviderRefused,
    ProviderUnreachable,
    ServiceError,
)
from gateway.inference.concurrency.waiting import Permit, Waiter
from gateway.inference.formats.completion import CompletionRequest, Format, encode
from gateway.inference.provider.connection import ClientGone, Interrupted, Stream
from gateway.inference.provider.dialects import BROKEN
from gateway.inference.provider.errors import CONGESTED, ProviderSignal
from gateway.inference.providers import Choice, ModelProvider, Providers
from gateway.inference.request import InferenceRequest
from gateway.inference.traces import EXCHANGE
from gateway.loops import every
from gateway.settings import Settings
from gateway.settings.prices import Usage, worst_case_tokens
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.spans import CLIENT
from gateway.telemetry.usage import MAX_ATTEMPTS, Attempt

logger = structlog.get_logger()

MIN_WAIT_SECONDS = 0.25  # for one call of the script, if requests are not allowed to wait
MIN_SECONDS_LEFT = 0.5  # of the total timeout, for another attempt
CHECK_SECONDS = 0.1  # between two checks of the waiting requests
STREAM_CHECK_SECONDS = 0.25  # between two checks of the running streams
NOTHING = Usage(0, 0)
MODEL_OFF = "This model is turned off; choose another one, or try again later."


class Upstream:
    def __init__(self, settings: Settings, registry: Registry, providers: Providers, metrics: Metrics) -> None:
        self.providers, self.availability, self.metrics = providers, providers.availability, metrics
        self.weights, self.wait_seconds = settings.provider_weights, settings.provider_wait or MIN_WAIT_SECONDS
        self.keep_alive_seconds = settings.keep_alive
        self.total_seconds = settings.provider_timeouts.total
        self.waiting: dict[Waiter, Exchange] = {}
        self._requeued_at = -1  # the number of changes of the availability at the last look at `waiting`
        self.running: dict[Stream, Exchange] = {}
        self._checked_at = -1  # the number of changes of records at the last look at `running`
        self.registry = registry

    async def check_open(self, app: App) -> None:
        """Raises what now keeps a request from being sent.

        It is InferenceDisabled, AppNotFound, AppSuspended or BackboneUnavailable.
        """
        if not self.availability.status().available:
            raise InferenceDisabled
        if (error := await self._find_refusal(app)) is not None:
            raise error

    def fail_waiting(self, error: ServiceError) -> None:
        """Lets all waiting requests fail."""
        _fail(self.waiting, error)

    # -- for the life of the process -------------------------------------------------------------------------

    async def check_waiters(self) -> None:
        """Updates the gauges, and fails or moves waiting requests whose app or providers have changed."""
        await every(CHECK_SECONDS, self._check_waiters, first=CHECK_SECONDS)

    async def _check_waiters(self) -> None:
        self.metrics.count_queued()
        self.metrics.open_streams.set(self.providers.count_streams())
        for provider in self.providers.all:
            provider.show_permits()
        if not self.waiting:
            return
        if not self.availability.status().available:
            self.fail_waiting(InferenceDisabled())
        changes = self.availability.changes
        if self._requeued_at != changes:
            for waiter, exchange in list(self.waiting.items()):
                exchange.requeue(waiter)
            self._requeued_at = changes
        await self._check_apps()

    async def _check_apps(self) -> None:
        for app in {exchange.app.id: exchange.app for exchange in self.waiting.values()}.values():
            if (error := await self._find_refusal(app)) is not None:
                _fail([waiter for waiter, exchange in self.waiting.items() if exchange.app.id == app.id], error)

    async def _find_refusal(self, app: App) -> ServiceError | None:
        """Returns what now ends requests of an app. A damaged record, which is logged, must not affect other apps."""
        try:
            present = await self.registry.app(app.name)
            account = None if present is None else await self.registry.account_of(present)
            if present is None or present.id != app.id or account is None:
                return AppNotFound()
            return AppSuspended() if find_suspension(present, account) is not None else None
        except msgspec.MsgspecError as error:
            logger.error("app.unreadable", app=app.name, error=str(error))
            return BackboneUnavailable()

    async def end_suspended(self) -> None:
        """Ends the running streams of suspended apps."""
        await every(STREAM_CHECK_SECONDS, self._end_suspended, first=STREAM_CHECK_SECONDS)

    async def _end_suspended(self) -> None:
        if self._checked_at == (changes := self.registry.cache.changes):
            return  # so that streams cost nothing while no record changes
        changed = {
            exchange.app.id: exchange.app
            for exchange in list(self.running.values())
            if self.registry.may_have_changed(exchange.app, exchange.account)
        }
        refusals = {app_id: await self._find_refusal(app) for app_id, app in changed.items()}
        for stream, exchange in list(self.running.items()):
            if isinstance(refusals.get(exchange.app.id), AppSuspended):
                stream.fail(AppSuspended())
        self._checked_at = changes


def _fail(waiters: Iterable[Waiter], error: ServiceError) -> None:
    for waiter in list(waiters):
        waiter.leave(error)


class _Disabled(Exception):
    """An operator disabled the provider before the request was sent to it."""


class Exchange:
    """One request, and its attempts at providers. While it waits, its client gets keep-alives in the format."""

    __slots__ = (
        "_began",
        "_changes",
        "_completion",
        "_failed",
        "_failed_at",
        "_format",
        "_permit",
        "_provider",
        "_request",
        "_started",
        "_stream",
        "_tokens",
        "_trial",
        "_tried",
        "_upstream",
        "account",
        "app",
        "billed",
    )

    def __init__(
        self,
        upstream: Upstream,
        request: InferenceRequest,
        completion: CompletionRequest,
        app: App,
        account: Account,
        format: Format,
    ) -> None:
        self._upstream, self._request, self._completion, self._format = upstream, request, completion, format
        self.app, self.account = app, account
        self._tokens = worst_case_tokens(completion.text_bytes, completion.max_tokens)
        # The attempt in progress, and its times in seconds of `time.perf_counter`.
        self._provider: ModelProvider | None = None
        self._permit: Permit | None = None
        self._stream: Stream | None = None
        self._trial = False  # it tries an unhealthy provider
        self._changes = 0  # of the availability, when the provider was chosen
        self._began: float | None = None  # when the first attempt was sent
        self._started = 0.0
        # The attempts before.
        self._tried: tuple[ModelProvider, ...] = ()
        self._failed: ServiceError | None = None  # the end of the last one
        self._failed_at: ModelProvider | None = None  # where, until the next attempt begins
        self.billed: Usage | None = NOTHING  # None: unknown, at most what was reserved

    async def __aenter__(self) -> Stream:
        """Raises the error with which the request ends: of the last attempt, or what kept it from being sent."""
        try:
            while True:
                await self._choose()
                try:
                    stream = await self._attempt()
                except _Disabled as error:
                    self._end(error)
                except ServiceError as error:
                    if not self._may_fail_over(error):
                        raise
                    self._failed, self._failed_at = error, self._provider
                    self._end(error)
                    await self._upstream.check_open(self.app)
                else:
                    self._completion.payload = b""  # an open stream does not keep its prompt
                    return stream
        except BaseException as error:
            self._end(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    # -- the choice ------------------------------------------------------------------------------------------

    async def _choose(self) -> None:
        """Takes a permit of the first provider that has one, or waits for one of any. Raises BackboneUnavailable."""
        self._changes = self._upstream.availability.changes
        choice = self._upstream.providers.choose(self._completion.model)
        if choice.on_trial and not self._tried and await self._take_trial(choice.on_trial):
            return
        candidates = self._candidates(choice)
        if not candidates:
            raise self._failed or InferenceDisabled(MODEL_OFF)
        for provider in candidates:
            if (permit := provider.permits.take_now(self.account.id, self._tokens)) is not None:
                self._provider, self._permit = provider, permit
                return
        try:
            self._permit = permit = await self._wait(candidates)
        except (ProviderQuotaExhausted, ProviderRefused) as refusal:
            raise self._failed or refusal from None
        self._provider = next(each for each in self._upstream.providers.all if each.permits is permit.permits)

    def _candidates(self, choice: Choice) -> Sequence[ModelProvider]:
        """Returns the providers that may get the request next, the preferred one first."""
        chosen = choice.candidates
        return [each for each in chosen if each not in self._tried] if self._tried else chosen

    async def _take_trial(self, on_trial: Sequence[ModelProvider]) -> bool:
        """Takes a permit of an unhealthy provider, if this request is the one of all that tries it now."""
        for provider in on_trial:
            if not provider.health.is_trial_due:
                continue
            if (permit := provider.permits.take_now(self.account.id, self._tokens)) is None:
                continue
            self._provider, self._permit = provider, permit
            if await provider.health.take_trial():
                self._trial = True
                return True
            self._provider = self._permit = None
            permit.permits.release(permit, served=False)
        return False

    async def _wait(self, candidates: Sequence[ModelProvider]) -> Permit:
        """Waits in the queues. If a keep-alive is due before the permit arrives, the client's stream begins with it."""
        request, upstream = self._request, self._upstream
        request.trace.enter("wait")
        began = time.perf_counter()
        weight = upstream.weights[self.account.plan]
        waiter = Waiter(self.account.id, self.app.name, weight, self._tokens)
        upstream.waiting[waiter] = self
        try:
            waiter.move([each.permits for each in candidates])
            request.watch(waiter.leave)
            if not self._completion.stream:
                return await waiter.wait(upstream.wait_seconds)
            keep_alive = partial(request.keep_alive, self._format)
            return await waiter.wait(upstream.wait_seconds, upstream.keep_alive_seconds, keep_alive)
        finally:
            del upstream.waiting[waiter]
            request.waited += time.perf_counter() - began
            request.unwatch()

    def requeue(self, waiter: Waiter) -> None:
        """Moves the waiting request to the providers that may serve it now. Raises BackboneUnavailable."""
        if candidates := self._candidates(self._upstream.providers.choose(self._completion.model)):
            waiter.move([each.permits for each in candidates])
        else:
            waiter.leave(self._failed or InferenceDisabled(MODEL_OFF))

    # -- an attempt ------------------------------------------------------------------------------------------

    async def _attempt(self) -> Stream:
        """Sends the request, and returns the stream once the answer has begun or ended."""
        provider, permit, request = self._provider, self._permit, self._request
        assert provider is not None
        assert permit is not None
        self._started, request.stream = time.perf_counter(), None
        request.trace.enter(EXCHANGE, CLIENT, provider.pool.span_attributes)
        try:
            connection = await provider.pool.connect()
            if self._upstream.registry.may_have_changed(self.app, self.account):
                provider.pool.keep(connection)  # it may close meanwhile
                await self._upstream.check_open(self.app)
                connection = await provider.pool.connect()
        except ProviderUnreachable:
            self._begin_attempt()
            raise
        if (obstacle := self._find_obstacle(provider)) is not None:
            provider.pool.keep(connection)
            raise obstacle
        self._begin_attempt()
        self._stream = request.stream = stream = provider.pool.post(connection, self._payload(provider))
        permit.permits.mark_sent(permit)
        if self._began is None:
            self._began = self._started
        else:
            stream.age = self._started - self._began
        self._upstream.running[stream] = self
        request.watch(stream.fail, stream.nudge)
        while (deltas := await stream.read()) == []:  # a keep-alive is due
            if self._completion.stream:
                await request.keep_alive(self._format)
                stream.unsent = 0.0
        if self._trial and deltas:
            provider.health.note_signal(ProviderSignal.RECOVERED, self.account.id)
        stream.put_back(deltas)
        return stream

    def _find_obstacle(self, provider: ModelProvider) -> Exception | None:
        """Returns what keeps the request from being sent after all: the checks before it took time."""
        availability = self._upstream.availability
        try:
            if not availability.status().available:
                return InferenceDisabled()
            if self._request.is_gone:
                return ClientGone()
            changed = availability.changes != self._changes
            return _Disabled() if changed and not availability.is_enabled(provider.name) else None
        except BackboneUnavailable as error:
            return error

    def _begin_attempt(self) -> None:
        self.billed = NOTHING
        if self._failed is not None and self._failed_at is not None:
            self._upstream.metrics.provider_failovers.labels(self._failed_at.name, self._failed.code).inc()
            self._failed_at = None

    def _payload(self, provider: ModelProvider) -> bytes:
        """Returns the request's body with the provider's own name for the model, which comes first in it."""
        model, payload = self._completion.model, self._completion.payload
        if (name := provider.settings.models[model]) == model:
            return payload
        return encode({"model": name})[:-1] + payload[len(encode({"model": model})) - 1 :]

    def _may_fail_over(self, error: ServiceError) -> bool:
        """Returns whether another provider may get the request: this one failed, and its answer had not begun."""
        return (
            self._provider is not None
            and error.code in PROVIDER_FAULT_CODES
            and (self._stream is None or not self._stream.answer.produced)
            and len(self._request.attempts) < MAX_ATTEMPTS - 1
            and (
                self._began is None
                or time.perf_counter() - self._began < self._upstream.total_seconds - MIN_SECONDS_LEFT
            )
        )

    def _end(self, error: BaseException | None) -> None:
        """Ends the attempt in progress, if there is one."""
        provider, stream, permit = self._provider, self._stream, self._permit
        self._provider = self._stream = self._permit = None
        self._trial = False
        if provider is None:
            return
        self._tried += (provider,)
        if stream is not None:
            self._request.unwatch()
            self._upstream.running.pop(stream, None)
            provider.pool.close_stream(stream)
            self.billed = billed_usage(stream, error)
        if permit is not None:
            tokens = None if self.billed is None else self.billed.input + self.billed.output
            permit.permits.release(permit, served=stream is not None, tokens=tokens)
        note_signal(provider, stream, error, self.account.id)
        if stream is not None or isinstance(error, ProviderUnreachable):
            self._record(provider, error)

    def _record(self, provider: ModelProvider, error: BaseException | None) -> None:
        code = "" if error is None else _code_of(error)
        took = time.perf_counter() - self._started
        self._request.attempts += (Attempt(provider.name, code, round(took * 1000)),)
        self._request.region = provider.settings.region
        self._upstream.metrics.count_attempt(provider.name, code or "ok")
        self._request.trace.fail_stage(code)


def _code_of(error: BaseException) -> str:
    if isinstance(error, ClientGone):
        return "CLIENT_GONE"
    return error.code if isinstance(error, ServiceError) else ServiceError.code


def note_signal(provider: ModelProvider, stream: Stream | None, error: BaseException | None, account: str) -> None:
    """Reports what an attempt of the account revealed about the provider."""
    if stream is None:
        if isinstance(error, ProviderUnreachable):
            provider.health.note_signal(ProviderSignal.FAILED, account)
    elif stream.answer.signal is not None:
        provider.health.note_signal(stream.answer.signal, account, stream.pause)
        if stream.answer.signal is CONGESTED:
            provider.permits.halve_limit()


def billed_usage(stream: Stream, error: BaseException | None) -> Usage | None:
    """Returns the usage that the provider reported, or nothing if it failed before it produced anything.

    A finish reason that says that the answer broke leaves the usage. Without one, the usage is unknown: of a complete
    answer, a client that left, a provider that failed halfway, a gateway that stopped, an app that was suspended.
    """
    answer, usage = stream.answer, stream.answer.usage
    failed = isinstance(error, ServiceError) and not isinstance(error, Interrupted | AppSuspended)
    if failed and not answer.produced and (usage is None or answer.finish != BROKEN):
        return NOTHING
    return usage
