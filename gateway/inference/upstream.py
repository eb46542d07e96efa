"""A provider as the handler sees it: one verb, `exchange`, which needs a permit, a connection and good health.

    async with upstream.exchange(request, completion, account, format) as stream:
        while (deltas := await stream.read()) is not None: …

Entering waits for a permit and sends the request. Leaving ends the stream, gives the permit back, and reports what the
exchange revealed about the provider, however it ended. `billed` is then the usage for which the provider bills.
"""

import asyncio
import contextlib
import time
from types import TracebackType

from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.errors import (
    AppNotFound,
    AppSuspended,
    BackboneUnavailable,
    InferenceDisabled,
    ProviderFailed,
    ProviderUnreachable,
    ServiceError,
)
from gateway.inference.availability import Availability
from gateway.inference.concurrency.permits import Permit, Permits
from gateway.inference.formats.completion import CompletionRequest, Format
from gateway.inference.provider.connection import Interrupted, Stream
from gateway.inference.provider.errors import ProviderSignal
from gateway.inference.provider.pool import Provider
from gateway.inference.request import InferenceRequest
from gateway.inference.spend.prices import Usage, worst_case_tokens
from gateway.inference.traces import EXCHANGE
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.spans import Kind

WAITER_CHECK_SECONDS = 0.1  # between two checks of the waiting requests
NOTHING = Usage(0, 0)


class Upstream:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        pool: Provider,
        permits: Permits,
        availability: Availability,
        metrics: Metrics,
    ) -> None:
        self.pool, self.permits, self.availability = pool, permits, availability
        self.weights, self.keep_alive_seconds = settings.provider_weights, settings.keep_alive
        self._registry, self._metrics = registry, metrics

    def exchange(
        self, request: InferenceRequest, completion: CompletionRequest, account: Account, format: Format
    ) -> "Exchange":
        """Returns an exchange to enter. While the request waits, its client gets keep-alives in the format."""
        return Exchange(self, request, completion, account, format)

    def note_signal(self, stream: Stream | None, error: BaseException | None) -> None:
        """Reports what an exchange revealed about the provider."""
        if stream is None:
            if isinstance(error, ProviderUnreachable):
                self.availability.note_signal(ProviderSignal.FAILED)
        elif stream.answer.signal is not None:
            self.availability.note_signal(stream.answer.signal)
            if stream.answer.signal is ProviderSignal.CONGESTED:
                self.permits.halve_limit()
        elif isinstance(error, ProviderFailed) and stream.status in (401, 403):
            self.availability.check_credential()

    async def check_waiters(self) -> None:
        """Updates the gauges of permits, and fails waiting requests that can no longer be served.

        Runs for the life of the process.
        """
        while True:
            await asyncio.sleep(WAITER_CHECK_SECONDS)
            self._metrics.count_queued()
            self._metrics.provider_permits.set(self.permits.in_force)
            self._metrics.provider_permits_used.set(self.permits.used)
            self._metrics.provider_waiting.set(self.permits.waiting)
            if not self.permits.waiting:
                continue
            with contextlib.suppress(BackboneUnavailable):
                if not self.availability.status().available:
                    self.permits.fail_waiting(InferenceDisabled())
                for name in self.permits.waiting_apps():
                    app = await self._registry.app(name)
                    if app is None:
                        self.permits.fail_waiting(AppNotFound(), app=name)
                    elif await self._registry.is_suspended(app):
                        self.permits.fail_waiting(AppSuspended(), app=name)


class Exchange:
    """One request at the provider."""

    __slots__ = ("_account", "_completion", "_format", "_permit", "_request", "_upstream", "billed")

    def __init__(
        self,
        upstream: Upstream,
        request: InferenceRequest,
        completion: CompletionRequest,
        account: Account,
        format: Format,
    ) -> None:
        self._upstream, self._request, self._completion = upstream, request, completion
        self._account, self._format = account, format
        self._permit: Permit | None = None
        self.billed: Usage | None = NOTHING  # None: unknown, at most what was reserved

    async def __aenter__(self) -> Stream:
        """Raises ProviderQuotaExhausted, ProviderRefused, ProviderUnreachable, InferenceDisabled or ClientGone."""
        request, completion, upstream = self._request, self._completion, self._upstream
        try:
            tokens = worst_case_tokens(completion.text_bytes, completion.max_tokens)
            permit = upstream.permits.take_now(self._account.id, tokens)
            self._permit = permit = permit or await self._wait(tokens)
            request.trace.enter(EXCHANGE, Kind.CLIENT, upstream.pool.span_attributes)
            stream = request.stream = await self._send()
            upstream.permits.mark_sent(permit)
            request.watch(stream.fail, stream.nudge)
        except BaseException as error:
            self._end(error)
            raise
        return stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    async def _wait(self, tokens: int) -> Permit:
        """Waits in the queue. If a keep-alive is due before the permit arrives, the client's stream begins with it."""
        request, upstream = self._request, self._upstream
        request.trace.enter("wait")
        began = time.perf_counter()
        weight = upstream.weights[self._account.plan]
        waiter = upstream.permits.join(self._account.id, request.app, weight, tokens)
        request.watch(waiter.leave)
        try:
            if not self._completion.stream:
                return await waiter.wait()
            return await waiter.wait(upstream.keep_alive_seconds, lambda: request.keep_alive(self._format.keep_alive))
        finally:
            request.waited = time.perf_counter() - began
            request.unwatch()

    async def _send(self) -> Stream:
        upstream, completion = self._upstream, self._completion
        connection = await upstream.pool.connect()
        # Checked again because reading the body and verifying the token took time, and the file acts at once.
        if upstream.availability.is_emergency_off():
            upstream.pool.keep(connection)
            raise InferenceDisabled
        payload, completion.payload = completion.payload, b""  # an open stream does not keep its prompt
        return upstream.pool.post(connection, payload)

    def _end(self, error: BaseException | None) -> None:
        upstream, stream = self._upstream, self._request.stream
        if stream is not None:
            self._request.unwatch()
            upstream.pool.close_stream(stream)
            self.billed = billed_usage(stream, error)
        if self._permit is not None:
            tokens = None if self.billed is None else self.billed.input + self.billed.output
            upstream.permits.release(self._permit, served=stream is not None, tokens=tokens)
        upstream.note_signal(stream, error)


def billed_usage(stream: Stream, error: BaseException | None) -> Usage | None:
    """Returns the usage that the provider reported, or nothing if it failed before it produced anything.

    Otherwise it is unknown: a complete answer without usage, a client that left, a provider that failed halfway, a
    gateway that stopped, an app that was suspended.
    """
    answer = stream.answer
    if answer.usage is not None:
        return answer.usage
    if isinstance(error, ServiceError) and not answer.produced and not isinstance(error, Interrupted | AppSuspended):
        return NOTHING
    return None
