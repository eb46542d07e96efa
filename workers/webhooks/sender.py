"""Sends events to their accounts' receivers.

`lanes` chooses the next event. A full lane drops its newest event. When the worker's memory is full, the longest
stalled lane drops the newer half of its events. While no lane is stalled, the worker waits. Each dropped event is
logged as dropped.

The steps of a delivery are: confirm the ownership of the entry, read the receiver, drop the event if it is too old,
sign it, POST it within 5 s, then log the outcome and acknowledge the entry in one step. A delivery that was answered is
never repeated, because its outcome stays in memory until Redis has accepted it. Only a worker that dies between the
POST and the log causes a second attempt. It has the same event id, so that receivers can recognize it. A delivery that
fails because of a bug is repeated twice, then logged as failed.

Some events lead to notices by e-mail too. These are queued as soon as the event is read, so that no other event of the
account delays them, and before its outcome is recorded, so that a worker that dies leaves them to another one.
`mailer.py` sends them.
"""

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

import msgspec
import structlog

from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.cancellation import RunningTasks, cancel
from gateway.errors import BackboneUnavailable
from gateway.events import scripts
from gateway.events.deliveries import READ_BODY_BYTES, summarize_answer
from gateway.events.notices import KIND_OF_EVENT, Notices
from gateway.events.records import DeliveryResult, EntryOwnership, QueuedEvent
from gateway.events.webhooks import GROUP, STREAM, Receiver, sign_event
from gateway.loops import raise_descriptor_limit, until_set
from gateway.outbound.addresses import CallFailed
from gateway.outbound.client import Client
from gateway.redis.client import COMMAND_SECONDS, Store, patient, until_redis_answers
from gateway.redis.errors import code_of
from gateway.settings import Settings
from gateway.telemetry import tracing
from gateway.telemetry.spans import NULL_TRACE, Kind, Trace, Value
from workers.stream import Consumer, Entry, require_partition
from workers.webhooks.lanes import LANE_EVENTS, STALLED_SECONDS, Lane, Lanes
from workers.webhooks.mailer import Mailer

logger = structlog.get_logger()

BUDGET_SECONDS = 5.0  # from the look-up of the name to the response's headers
ANSWER_BYTES = 65_536  # read of a response, within the budget
MAX_DELIVERIES = 2_048  # concurrent, per worker
MAX_EVENTS = 20_000  # in memory, per worker
MAX_AGE_SECONDS = 86_400.0  # older events are dropped


def _read_event(entry: Entry) -> QueuedEvent:
    """Returns the event of an entry, without its data. Raises KeyError or ValueError if the entry is not an event."""
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
    def __init__(self, settings: Settings, *, budget: float = BUDGET_SECONDS, lane_capacity: int = LANE_EVENTS) -> None:
        self._store = Store(settings.redis_url, ca_file=settings.ca_file)
        self._vault = Vault(settings.encryption_key)
        self._http = Client(
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file or None,
            connections=MAX_DELIVERIES,
            connections_per_origin=0,  # accounts may share a host; `lanes` bounds each account
        )
        # A delivery may start within these seconds after its ownership was confirmed, because it must end before
        # another worker may claim the event.
        self._budget = budget
        self._ownership_lasts = settings.webhook_claim_idle - budget - 1
        self._notices = None
        if settings.sends_notices:
            self._notices = patient(Notices(self._store), waiting="notice.waiting")
        self._noticing: dict[tuple[str, str], asyncio.Task[None]] = {}  # by partition and entry: queues its notices
        self._tracer = tracing.tracer()
        self._lanes = Lanes(capacity=lane_capacity)
        self._running, self._dropping = RunningTasks(), RunningTasks()
        self._space_freed = asyncio.Event()
        self._consumer = Consumer(
            self._store, STREAM, GROUP, settings.webhook_claim_idle, self._accept, self._wait_for_space
        )

    async def run(self) -> None:
        """Runs until canceled. Deliveries under way then end within their budget, and the other events are released."""
        try:
            await self._consumer.run()
        finally:
            self._lanes.clear()
            await self._finish_running()
            try:
                async with asyncio.timeout(COMMAND_SECONDS):
                    await self._consumer.release_entries()
            except (BackboneUnavailable, TimeoutError) as error:
                logger.warning("webhooks.not_released", error=code_of(error.__cause__ or error))
            await self._http.close()
            await self._store.close()

    async def _finish_running(self) -> None:
        running = [*self._running.values(), *self._dropping.values(), *self._noticing.values()]
        if running:
            await asyncio.wait(running, timeout=self._budget + 2 * COMMAND_SECONDS)
        # Redis is unavailable: another worker repeats the deliveries that could not be logged.
        await cancel(*running)

    # -- many deliveries -------------------------------------------------------------------------------------

    async def _wait_for_space(self) -> None:
        while self._consumer.held_count >= MAX_EVENTS:
            if not self._dropping:
                for entry in self._lanes.drop_stalled():
                    self._drop(entry)
            self._space_freed.clear()
            await until_set(self._space_freed, STALLED_SECONDS)

    def _accept(self, entry: Entry) -> None:
        """Accepts an entry from the stream. Raises KeyError or ValueError if it is not an event."""
        event = _read_event(entry)
        if self._notices is not None and event.type in KIND_OF_EVENT and not (event.sample or event.redelivery):
            self._noticing[entry.tag, entry.id] = asyncio.create_task(self._queue_notices(self._notices, entry))
        if self._lanes.add(entry):
            self._start_deliveries()
        else:
            self._drop(entry)

    def _start_deliveries(self) -> None:
        while len(self._running) < MAX_DELIVERIES and (taken := self._lanes.take_entry()):
            self._running.start(self._run_delivery(*taken))

    def _drop(self, entry: Entry) -> None:
        self._dropping.start(self._record_dropped(entry))

    async def _queue_notices(self, notices: Notices, entry: Entry) -> None:
        try:
            await notices.queue_for_event(entry.fields)
        except Exception as error:  # a bug, which must not keep the event from its receiver
            logger.error("notice.not_queued", delivery=entry.fields["id"], exc_info=error)

    def _forget_entry(self, entry: Entry) -> None:
        if noticing := self._noticing.pop((entry.tag, entry.id), None):
            noticing.cancel()
        self._consumer.forget_entry(entry)
        self._space_freed.set()

    # -- one delivery ----------------------------------------------------------------------------------------

    async def _run_delivery(self, lane: Lane, entry: Entry) -> None:
        trace = NULL_TRACE if self._tracer is None else self._tracer.begin("deliver", Kind.CONSUMER)
        try:
            await self._deliver(entry, lane, trace)
        except Exception as error:
            trace.fail(type(error).__name__)
            # A bug: the event stays pending, and a worker claims it again after the idle time.
            logger.error("delivery.postponed", delivery=entry.fields["id"], exc_info=error)
            with contextlib.suppress(BackboneUnavailable):
                await self._consumer.fail_entry(entry, error, _read_event(entry))
        finally:
            trace.describe(_describe_event(entry))
            trace.finish()
            self._forget_entry(entry)
            self._lanes.end_delivery(lane)
            self._start_deliveries()

    async def _deliver(self, entry: Entry, lane: Lane, trace: Trace) -> None:
        trace.enter("confirm")
        ownership = await self._confirm_ownership(entry)
        if not ownership.owned:
            return
        data, began = ownership.data, time.time()
        if not data or began - int(entry.fields["at"]) / 1000 > MAX_AGE_SECONDS:
            result = DeliveryResult("dropped", reason="expired")
        elif not ownership.receiver:
            result = DeliveryResult("dropped", reason="no-receiver")
        else:
            receiver = msgspec.json.decode(ownership.receiver, type=Receiver)
            trace.enter("POST", Kind.CLIENT, {"capsule.attempt": ownership.attempt})
            result = await self._send(entry, data, receiver, ownership.previous_secret, began)
            self._lanes.adapt_lane(lane, timed_out=result.reason == "timeout")
        if trace.recorded:
            _describe_result(trace, result)
        trace.enter("record")
        await self._record_delivery(entry, result, began)

    async def _confirm_ownership(self, entry: Entry) -> EntryOwnership:
        """Claims the delivery. Repeats this if it took so long that another worker may have claimed the entry since."""
        while True:
            began = time.monotonic()
            ownership = await until_redis_answers(lambda: self._claim_delivery(entry), waiting="delivery.waiting")
            if not ownership.owned or time.monotonic() - began <= self._ownership_lasts:
                return ownership

    async def _claim_delivery(self, entry: Entry) -> EntryOwnership:
        await self._consumer.confirm_name()
        account, event, consumer = entry.fields["account"], entry.fields["id"], self._consumer.name
        return await scripts.claim_delivery(
            self._store, entry.tag, account, event, group=GROUP, consumer=consumer, entry=entry.id
        )

    async def _send(
        self, entry: Entry, data: str, receiver: Receiver, previous_secret: str, now: float
    ) -> DeliveryResult:
        fields, url = entry.fields, receiver.url
        try:
            secrets = [self._vault.open(receiver.secret), *self._open_previous(previous_secret)]
        except NoEncryptionKey as error:
            logger.error("delivery.sealed", account=fields["account"], error=str(error))
            return DeliveryResult("failed", reason="secret", url=url)
        signed = sign_event(secrets, fields["id"], fields["type"], data, now)
        try:
            answer = await self._http.send(
                "POST",
                url,
                tenant=fields["account"],
                headers=signed.headers,
                content=signed.body,
                budget=self._budget,
                drain_bytes=ANSWER_BYTES,
                keep_bytes=READ_BODY_BYTES,
            )
        except CallFailed as error:
            return DeliveryResult("failed", reason=error.reason, url=url)
        except Exception as error:  # this must become an outcome, because an event without one is sent again
            logger.error("delivery.crashed", delivery=fields["id"], exc_info=error)
            return DeliveryResult("failed", reason="internal", url=url)
        kept = summarize_answer(answer.headers.items(), answer.body, [*secrets, *signed.signatures])
        if 200 <= answer.status < 300:
            return DeliveryResult("delivered", answer.status, "", url, *kept)
        return DeliveryResult("failed", answer.status, "status", url, *kept)

    def _open_previous(self, sealed: str) -> list[str]:
        """Returns the previous secret, or nothing if it cannot be decrypted: then only the current secret signs."""
        try:
            return [self._vault.open(sealed)] if sealed else []
        except NoEncryptionKey as error:
            logger.warning("delivery.previous_secret_sealed", error=str(error))
            return []

    async def _record_dropped(self, entry: Entry) -> None:
        try:
            await self._record_delivery(entry, DeliveryResult("dropped", reason="overflow"), time.time())
        finally:
            self._forget_entry(entry)

    async def _record_delivery(self, entry: Entry, result: DeliveryResult, began: float) -> None:
        fields, tag = entry.fields, entry.tag
        if noticing := self._noticing.get((entry.tag, entry.id)):
            await noticing
        at, duration = int(began * 1000), int((time.time() - began) * 1000)
        store = patient(self._store, waiting="delivery.waiting")
        if await scripts.record_delivery(
            store, tag, _read_event(entry), result, group=GROUP, entry=entry.id, at=at, duration=duration
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


def _describe_event(entry: Entry) -> dict[str, Value]:
    fields = entry.fields
    return {
        "capsule.delivery": fields["id"],
        "capsule.event": fields["type"],
        "capsule.account": fields["account"],
        "capsule.app": fields["app"],
    }


def _describe_result(trace: Trace, result: DeliveryResult) -> None:
    """Adds the result to the trace: only the host of the receiver's address, and only the status of its answer."""
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
    raise_descriptor_limit()  # a delivery without a socket fails
    async with asyncio.TaskGroup() as group:
        group.create_task(Sender(settings).run())
        if settings.sends_notices:
            group.create_task(Mailer(settings).run())
