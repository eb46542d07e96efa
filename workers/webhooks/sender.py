"""Sends events to their accounts' receivers.

`lanes` decides whose event is next. A full lane gives up its newest event. When the worker's memory is full, the
longest lane that has stalled gives up the newer half of its events; while every lane moves, the worker waits. An event
that is given up is logged as dropped, never lost silently.

One delivery, from top to bottom: confirm ownership, read the receiver, drop what is too old, sign, POST within 5 s,
then log and acknowledge in one step. A delivery that was answered is never repeated: its outcome is kept until Redis
has accepted it. Only a worker that dies between the POST and the log causes a second attempt, with the same event id,
so that receivers can recognize it. A delivery that fails by a fault of ours is repeated twice, then logged as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import structlog

from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import BackboneUnavailable
from gateway.events import scripts
from gateway.events.deliveries import READ_BODY, describe_answer
from gateway.events.records import Delivery, Ownership, QueuedEvent
from gateway.events.webhooks import GROUP, STREAM, Receiver, sign_event
from gateway.outbound.addresses import CallFailed
from gateway.outbound.client import Client
from gateway.redis.client import ATTEMPT, Store, until_redis_answers
from gateway.redis.errors import backbone
from gateway.redis.faults import code_of
from gateway.settings import Settings
from gateway.telemetry import tracing
from gateway.telemetry.spans import Kind, Trace, Value
from workers.stream import Consumer, Entry, require_partition
from workers.webhooks.lanes import STALLED, Lane, Lanes

logger = structlog.get_logger()

BUDGET = 5.0  # seconds, from the look-up of the name to the response's headers
ANSWER_BYTES = 65_536  # read of a response, within the budget
DELIVERIES = 2_048  # at a time, per worker
EVENTS = 20_000  # in memory, per worker
TOO_OLD = 86_400.0  # seconds
FILES = 16_384  # sockets: of the deliveries under way, and of idle connections

Outcome = Literal["delivered", "failed", "dropped"]


class Result(NamedTuple):
    outcome: Outcome
    status: int | None = None
    reason: str = ""
    url: str = ""  # where it was sent to
    headers: str = ""  # of the answer
    body: str = ""  # its beginning


def _read_event(entry: Entry) -> QueuedEvent:
    """The event of an entry, without its data. Raises KeyError or ValueError."""
    fields = entry.fields
    event = QueuedEvent(
        id=fields["id"],
        account=fields["account"],
        app=fields["app"],
        type=fields["type"],
        data="",
        sample="sample" in fields,
        redelivery=int(fields.get("redelivery", 0)),
    )
    int(fields["at"])
    require_partition(entry)
    return event


class Sender:
    def __init__(self, settings: Settings) -> None:
        self._store = Store(settings.redis_url, ca_file=settings.ca_file)
        self._vault = Vault(settings.encryption_key)
        self._http = Client(
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file or None,
            connections=DELIVERIES,
            connections_per_origin=0,  # accounts may share a host; `lanes` bounds each account
        )
        # Seconds after confirming the ownership in which a delivery may start: it must end before another worker may
        # claim the event.
        self._ownership_lasts = settings.webhook_claim_idle - BUDGET - 1
        self._tracer = tracing.tracer()
        self._lanes = Lanes()
        self._running: set[asyncio.Task[None]] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._space_freed = asyncio.Event()
        self._consumer = Consumer(
            self._store, STREAM, GROUP, settings.webhook_claim_idle, self._accept, self._wait_for_space
        )

    async def run(self) -> None:
        """Runs until it is canceled. Then deliveries under way end within their budget; the rest is given back."""
        try:
            await self._consumer.run()
        finally:
            self._lanes.clear()
            await self._finish_running()
            try:
                with backbone():
                    async with asyncio.timeout(ATTEMPT):
                        await self._consumer.release()
            except BackboneUnavailable as error:
                logger.warning("webhooks.not_released", error=code_of(error.__cause__))
            await self._http.close()
            await self._store.close()

    async def _finish_running(self) -> None:
        running = self._running | self._dropping
        if running:
            await asyncio.wait(running, timeout=BUDGET + 2 * ATTEMPT)
        for task in running:  # Redis is away: another worker repeats the deliveries that could not be logged
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # -- many deliveries -------------------------------------------------------------------------------------

    async def _wait_for_space(self) -> None:
        while self._consumer.holding >= EVENTS:
            if not self._dropping:
                for entry in self._lanes.give_up_stalled():
                    self._drop(entry)
            self._space_freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALLED):
                    await self._space_freed.wait()

    def _accept(self, entry: Entry) -> None:
        """Raises KeyError or ValueError for an entry that no event has."""
        _read_event(entry)
        if self._lanes.add(entry):
            self._start_deliveries()
        else:
            self._drop(entry)

    def _start_deliveries(self) -> None:
        while len(self._running) < DELIVERIES and (taken := self._lanes.take()):
            self._start(self._running, self._run_delivery(*taken))

    def _drop(self, entry: Entry) -> None:
        self._start(self._dropping, self._log_dropped(entry))

    def _start(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _forget(self, entry: Entry) -> None:
        self._consumer.done(entry)
        self._space_freed.set()

    # -- one delivery ----------------------------------------------------------------------------------------

    async def _run_delivery(self, lane: Lane, entry: Entry) -> None:
        trace = None if self._tracer is None else self._tracer.begin("deliver", Kind.CONSUMER)
        try:
            await self._deliver(entry, lane, trace)
        except Exception as error:
            if trace is not None:
                trace.fail(type(error).__name__)
            # A fault of ours: the event stays pending, and is claimed again after the idle time.
            logger.error("delivery.postponed", delivery=entry.fields["id"], exc_info=error)
            with contextlib.suppress(BackboneUnavailable):
                await self._consumer.fail(entry, error, _read_event(entry))
        finally:
            if trace is not None:
                trace.root.attributes |= _describe(entry)
                trace.finish()
            self._forget(entry)
            self._lanes.finish(lane)
            self._start_deliveries()

    async def _deliver(self, entry: Entry, lane: Lane, trace: Trace | None) -> None:
        if trace is not None:
            trace.enter("confirm")
        ownership = await self._confirm_ownership(entry)
        if not ownership.owned:
            return
        data = ownership.data or entry.fields.get("data")  # an event that an earlier version queued has its data itself
        began = time.time()
        if not data or began - int(entry.fields["at"]) / 1000 > TOO_OLD:
            result = Result("dropped", reason="expired")
        elif not ownership.receiver:
            result = Result("dropped", reason="no-receiver")
        else:
            receiver = msgspec.json.decode(ownership.receiver, type=Receiver)
            if trace is not None:
                trace.enter("POST", Kind.CLIENT).attributes["capsule.attempt"] = ownership.attempt
            result = await self._send(entry, data, receiver, ownership.previous_secret, began)
            self._lanes.learn(lane, timed_out=result.reason == "timeout")
        if trace is not None:
            _describe_result(trace, result)
            trace.enter("record")
        await self._log(entry, result, began)

    async def _confirm_ownership(self, entry: Entry) -> Ownership:
        """Asks again when the answer, or this process, was so slow that another worker may have claimed the entry."""
        while True:
            asked = time.monotonic()
            ownership = await until_redis_answers(lambda: self._begin(entry), waiting="delivery.waiting")
            if not ownership.owned or time.monotonic() - asked <= self._ownership_lasts:
                return ownership

    async def _begin(self, entry: Entry) -> Ownership:
        await self._consumer.confirm_name()
        account, event, consumer = entry.fields["account"], entry.fields["id"], self._consumer.name
        return await scripts.claim_delivery(
            self._store, entry.tag, account, event, group=GROUP, consumer=consumer, entry=entry.id
        )

    async def _send(self, entry: Entry, data: str, receiver: Receiver, previous_secret: str, now: float) -> Result:
        fields, url = entry.fields, receiver.url
        try:
            secrets = [self._vault.open(receiver.secret), *self._open_previous(previous_secret)]
        except NoEncryptionKey as error:
            logger.error("delivery.sealed", account=fields["account"], error=str(error))
            return Result("failed", reason="secret", url=url)
        signed = sign_event(secrets, fields["id"], fields["type"], data, now)
        try:
            answer = await self._http.send(
                "POST",
                url,
                tenant=fields["account"],
                headers=signed.headers,
                content=signed.body,
                budget=BUDGET,
                drain=ANSWER_BYTES,
                keep=READ_BODY,
            )
        except CallFailed as error:
            return Result("failed", reason=error.reason, url=url)
        except Exception as error:  # must become an outcome: without one the event would be sent again
            logger.error("delivery.crashed", delivery=fields["id"], exc_info=error)
            return Result("failed", reason="internal", url=url)
        kept = describe_answer(answer.headers.items(), answer.body, [*secrets, *signed.signatures])
        if 200 <= answer.status < 300:
            return Result("delivered", answer.status, "", url, *kept)
        return Result("failed", answer.status, "status", url, *kept)

    def _open_previous(self, sealed: str) -> list[str]:
        """Nothing if it cannot be read: the current secret alone signs then."""
        try:
            return [self._vault.open(sealed)] if sealed else []
        except NoEncryptionKey as error:
            logger.warning("delivery.previous_secret_sealed", error=str(error))
            return []

    async def _log_dropped(self, entry: Entry) -> None:
        try:
            await self._log(entry, Result("dropped", reason="overflow"), time.time())
        finally:
            self._forget(entry)

    async def _log(self, entry: Entry, result: Result, began: float) -> None:
        fields, tag = entry.fields, entry.tag
        event = _read_event(entry)
        duration = int((time.time() - began) * 1000)
        delivery = Delivery(
            outcome=result.outcome,
            at=int(began * 1000),
            duration=duration,
            status=result.status,
            reason=result.reason,
            url=result.url,
            headers=result.headers,
            body=result.body,
        )
        if await until_redis_answers(
            lambda: scripts.record_delivery(self._store, tag, event, delivery, group=GROUP, entry=entry.id),
            waiting="delivery.waiting",
        ):
            logger.info(
                "delivery",
                delivery=fields["id"],
                account=fields["account"],
                type=fields["type"],
                outcome=result.outcome,
                status=result.status,
                reason=result.reason,
            )


def _describe(entry: Entry) -> dict[str, Value]:
    fields = entry.fields
    return {
        "capsule.delivery": fields["id"],
        "capsule.event": fields["type"],
        "capsule.account": fields["account"],
        "capsule.app": fields["app"],
    }


def _describe_result(trace: Trace, result: Result) -> None:
    """Of the receiver's address only the host, and nothing of its answer but the status."""
    trace.root.attributes["capsule.outcome"] = result.outcome
    if result.url:
        attempt = trace.stages[-1].attributes
        attempt["http.request.method"] = "POST"
        attempt["server.address"] = urlsplit(result.url).hostname or ""
        if result.status is not None:
            attempt["http.response.status_code"] = result.status
    if result.outcome == "failed":
        trace.fail(str(result.status) if result.reason == "status" else result.reason)
    elif result.outcome == "dropped":
        trace.root.set_error(result.reason, failed=False)


async def run(settings: Settings) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:  # the usual limit is a thousand, and a delivery that gets no socket fails
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    await Sender(settings).run()
