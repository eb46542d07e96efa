"""The health of one provider, which all processes share.

Requests and probes give signals about it. It is a record in Redis, and every process keeps a copy. Each change makes
every process read it again. A process therefore writes at most one change per `PUBLISH_INTERVAL_SECONDS`. It collects
the signals in between, and writes them as one change if they change anything.

A provider whose quota is nearly used up answers some requests and refuses others. So a completion ends
`quota-exhausted` only if no process has been refused for `REFUSAL_SECONDS`. A key in Redis that expires tells them.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Protocol

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.inference.provider.errors import ProviderSignal
from gateway.keys import probe_key, provider_key, refusal_key
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record

logger = structlog.get_logger()

FAILURES = 3  # failed attempts in a row after which the provider counts as unreachable
PROBE_INTERVAL_SECONDS = 30.0  # between probes while the provider refuses the credential or is unreachable
KEY_CHECK_SECONDS = 1.0  # between two looks at the file of the key
PROBE_LEASE_SECONDS = 20  # for which one process has the right to probe
PUBLISH_INTERVAL_SECONDS = 0.5  # between two changes of the provider's health by one process
REFUSAL_SECONDS = 2.0  # after a refusal for lack of quota, in which completions do not end the status


class ProviderStatus(enum.StrEnum):
    """From worst to best."""

    MISCONFIGURED = "misconfigured"
    PROVIDER_UNREACHABLE = "provider-unreachable"
    QUOTA_EXHAUSTED = "quota-exhausted"
    OPERATIONAL = "operational"

    @property
    def rank(self) -> int:
        return list(ProviderStatus).index(self)


class HealthRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    failures: int = 0  # in a row
    quota: bool = False  # the quota is used up
    refused: bool = False  # the credential is refused

    def after(self, signal: ProviderSignal) -> HealthRecord:
        match signal:
            case ProviderSignal.COMPLETION:
                return HealthRecord()
            case ProviderSignal.REACHED | ProviderSignal.CONGESTED:
                # GET /models succeeds without quota, so only a completion shows that there is quota again.
                return HealthRecord(quota=self.quota)
            case ProviderSignal.FAILED:
                return msgspec.structs.replace(self, failures=min(self.failures + 1, FAILURES))
            case ProviderSignal.QUOTA:
                return HealthRecord(quota=True)
            case ProviderSignal.REFUSED:
                return HealthRecord(refused=True)

    def status(self, *, configured: bool) -> ProviderStatus:
        """Returns the status. `configured` means that there is a credential."""
        if not configured or self.refused:
            return ProviderStatus.MISCONFIGURED
        if self.quota:
            return ProviderStatus.QUOTA_EXHAUSTED
        return ProviderStatus.PROVIDER_UNREACHABLE if self.failures >= FAILURES else ProviderStatus.OPERATIONAL


def condense(signals: list[ProviderSignal]) -> list[ProviderSignal]:
    """Returns the fewest signals, at most five, that change any health as these do."""
    condensed: list[ProviderSignal] = []
    for signal in signals:
        match signal:
            case ProviderSignal.COMPLETION | ProviderSignal.QUOTA | ProviderSignal.REFUSED:
                condensed = [signal]  # earlier signals have no effect
            case ProviderSignal.REACHED | ProviderSignal.CONGESTED:
                condensed = [*(s for s in condensed[:1] if s is not ProviderSignal.FAILED), signal]
            case ProviderSignal.FAILED if condensed[-FAILURES:] != [signal] * FAILURES:
                condensed.append(signal)
    return condensed


async def read_health(store: Store, provider: str) -> HealthRecord:
    """Raises BackboneUnavailable."""
    return msgspec.json.decode(await store.get(provider_key(provider)) or "{}", type=HealthRecord)


class Probed(Protocol):
    """The provider's client."""

    def is_configured(self) -> bool:
        """Returns whether there is a credential."""

    def read_key(self) -> bool:
        """Reads the credential again. Returns whether it is another one."""

    async def probe(self) -> ProviderSignal | None:
        """Sends a GET /models. Returns None if this machine could not send it."""


class Health:
    """The health of one provider in this process."""

    def __init__(self, provider: str, registry: Registry, client: Probed) -> None:
        self.provider, self._store, self._client = provider, registry.store, client
        self._record = HealthRecord()
        # Only an answer shows that there is quota again. So that a provider that is passed over gets a chance to give
        # one, the next request may go to it.
        self.on_trial = False
        self._signals: list[ProviderSignal] = []  # not written yet
        self._written = float("-inf")  # when this process last wrote the health, on the loop's clock
        self._refused = float("-inf")  # when it last wrote that the quota is used up
        self._recorder: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        registry.cache.subscribe(provider_key(provider), self.reload)

    @property
    def status(self) -> ProviderStatus:
        return self._record.status(configured=self._client.is_configured())

    @property
    def is_up(self) -> bool:
        """Returns whether the provider answered last, has quota and accepts the credential, if there is one."""
        return self._record.status(configured=True) is ProviderStatus.OPERATIONAL

    @property
    def is_usable(self) -> bool:
        """Returns whether requests may go to this provider while others are healthy too."""
        return self.on_trial or self.status is ProviderStatus.OPERATIONAL

    def end_trial(self) -> None:
        """Lets no further request try the provider."""
        self.on_trial = False
        self.on_change()

    async def reload(self) -> None:
        self._record = await read_health(self._store, self.provider)
        self.on_change()

    def note_signal(self, signal: ProviderSignal) -> None:
        """Records a signal in the background. Writes nothing if the signal changes nothing."""
        if signal is ProviderSignal.QUOTA:
            self._note_refusal()
        # While a write is in progress, this process does not know the health that follows it.
        writing = self._recorder is not None and not self._recorder.done()
        if not writing and self._record.after(signal) == self._record:
            return
        self._signals = condense([*self._signals, signal])
        if not writing:
            self._recorder = asyncio.create_task(self._write_signals())

    def _note_refusal(self) -> None:
        """Tells all processes that the quota is used up, often enough that the key lives while this goes on."""
        now = asyncio.get_running_loop().time()
        if now >= self._refused + REFUSAL_SECONDS / 4:
            self._refused = now
            self._refusal = asyncio.create_task(self._write_refusal())

    async def _write_refusal(self) -> None:
        with suppress(BackboneUnavailable):
            await self._store.client.set(refusal_key(self.provider), "1", px=round(REFUSAL_SECONDS * 1000))

    def check_credential(self) -> None:
        """Probes the provider after a request got a 401 or 403. Only a refusal of the probe counts."""
        if self._prober is None or self._prober.done():
            self._prober = asyncio.create_task(self._probe_and_note())

    async def probe_if_down(self) -> None:
        """Probes the provider if it is down and no other process does so. Without quota, a request is the probe."""
        if self.is_up:
            return
        with suppress(BackboneUnavailable):
            process = str(os.getpid())
            if not await self._store.client.set(probe_key(self.provider), process, nx=True, ex=PROBE_LEASE_SECONDS):
                return
            if self._record.quota:
                self.on_trial = True
                self.on_change()
            else:
                await self._probe_and_note()

    def check_key(self) -> None:
        """Reads the key again, and probes the provider with another one."""
        if self._client.read_key():
            self.on_change()
            if self._record.refused:
                self.check_credential()

    async def _probe_and_note(self) -> None:
        if (signal := await self._client.probe()) is not None:
            self.note_signal(signal)
        self.on_change()  # the probe has read the key again

    async def _write_signals(self) -> None:
        """Writes the collected signals until none is left that changes anything."""
        loop = asyncio.get_running_loop()
        while self._signals:
            await asyncio.sleep(self._written + PUBLISH_INTERVAL_SECONDS - loop.time())
            signals, self._signals = self._signals, []
            with suppress(BackboneUnavailable):  # the next request reveals the same
                ends_quota = self._record.quota and signals[0] is ProviderSignal.COMPLETION
                if ends_quota and (left := await self._store.client.pttl(refusal_key(self.provider))) > 0:
                    self._signals = condense([*signals, *self._signals])
                    await asyncio.sleep(left / 1000)
                    continue
                await self._change(signals)
            if reduce(HealthRecord.after, self._signals, self._record) == self._record:
                self._signals = []

    async def _change(self, signals: list[ProviderSignal]) -> None:
        async def compute(present: str) -> Change[tuple[HealthRecord, bool]]:
            health = msgspec.json.decode(present or "{}", type=HealthRecord)
            after = reduce(HealthRecord.after, signals, health)
            changed = after != health
            return Change(msgspec.json.encode(after).decode() if changed else None, (after, changed))

        key = provider_key(self.provider)
        self._record, changed = await change_record(self._store, key, compute, subject="the provider's health")
        if changed:
            self._written = asyncio.get_running_loop().time()
        self.on_change()


async def keep_probing(healths: Sequence[Health]) -> None:
    """Probes the providers that are down, and reads all keys again. Runs for the life of the process."""
    loop = asyncio.get_running_loop()
    due = loop.time() + PROBE_INTERVAL_SECONDS
    while True:
        await asyncio.sleep(min(KEY_CHECK_SECONDS, PROBE_INTERVAL_SECONDS))
        for health in healths:
            health.check_key()
        if loop.time() >= due:
            due = loop.time() + PROBE_INTERVAL_SECONDS
            await asyncio.gather(*(health.probe_if_down() for health in healths))
