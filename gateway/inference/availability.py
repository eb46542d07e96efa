"""Determines whether inference is available, and if not, why.

Configuration (the switch, the approval, the emergency-off file, the credential) decides whether inference is available.
Signals about the provider, from requests and probes, only refine the status, so an outage never removes the endpoint's
address from builds. The switch and the provider's health are in Redis, and every process keeps a copy. Until a process
has read them, it responds as if Redis were unreachable.

Each change of the health makes every process read it again. A process therefore writes at most one change per
`PUBLISH_INTERVAL_SECONDS`. It collects the signals in between, and writes them as one change if they change anything.

A provider whose quota is nearly used up answers some requests and refuses others. So a completion ends
`quota-exhausted` only if no process has been refused for `REFUSAL_SECONDS`. A key in Redis that expires tells them.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import reduce
from typing import TypeVar

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.inference.provider.errors import ProviderSignal
from gateway.keys import INFERENCE_KEY, PROBE_KEY, PROVIDER_KEY, REFUSAL_KEY
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.settings import Settings

logger = structlog.get_logger()

T = TypeVar("T")

FAILURES = 3  # failed attempts in a row after which the provider counts as unreachable
PROBE_INTERVAL_SECONDS = 30.0  # between probes while the provider refuses the credential or is unreachable
PROBE_LEASE_SECONDS = 20  # for which one process has the right to probe
PUBLISH_INTERVAL_SECONDS = 0.5  # between two changes of the provider's health by one process
REFUSAL_SECONDS = 2.0  # after a refusal for lack of quota, in which completions do not end the status


class InferenceStatus(enum.StrEnum):
    DISABLED = "disabled"
    MISCONFIGURED = "misconfigured"
    QUOTA_EXHAUSTED = "quota-exhausted"
    PROVIDER_UNREACHABLE = "provider-unreachable"
    OPERATIONAL = "operational"

    @property
    def available(self) -> bool:
        return self not in (InferenceStatus.DISABLED, InferenceStatus.MISCONFIGURED)


class ProviderHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    failures: int = 0  # in a row
    quota: bool = False  # the quota is used up
    refused: bool = False  # the credential is refused

    def after(self, signal: ProviderSignal) -> ProviderHealth:
        match signal:
            case ProviderSignal.COMPLETION:
                return ProviderHealth()
            case ProviderSignal.REACHED | ProviderSignal.CONGESTED:
                # GET /models succeeds without quota, so only a completion shows that there is quota again.
                return ProviderHealth(quota=self.quota)
            case ProviderSignal.FAILED:
                return msgspec.structs.replace(self, failures=min(self.failures + 1, FAILURES))
            case ProviderSignal.QUOTA:
                return ProviderHealth(quota=True)
            case ProviderSignal.REFUSED:
                return ProviderHealth(refused=True)


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


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The runtime switch and the approval. None leaves the value to the settings."""

    enabled: bool | None = None
    approved: bool | None = None

    def is_enabled(self, settings: Settings) -> bool:
        return settings.inference if self.enabled is None else self.enabled

    def is_approved(self, settings: Settings) -> bool:
        return settings.processing_approved if self.approved is None else self.approved


class InferenceState(msgspec.Struct):
    """The status, and the gates that determine it, for operators."""

    managedInference: bool
    managedInferenceStatus: InferenceStatus
    enabled: bool
    approved: bool
    emergencyOff: bool


def derive_status(*, enabled: bool, approved: bool, configured: bool, health: ProviderHealth) -> InferenceStatus:
    """Derives the status. `configured` means that there is a credential."""
    if not enabled or not approved:
        return InferenceStatus.DISABLED
    if not configured or health.refused:
        return InferenceStatus.MISCONFIGURED
    if health.quota:
        return InferenceStatus.QUOTA_EXHAUSTED
    if health.failures >= FAILURES:
        return InferenceStatus.PROVIDER_UNREACHABLE
    return InferenceStatus.OPERATIONAL


async def is_offered(settings: Settings, store: Store) -> bool:
    """Returns whether apps may use inference, for a process that calls no provider. Raises BackboneUnavailable."""
    switch = await _read_record(store, INFERENCE_KEY, Switch)
    status = derive_status(
        enabled=switch.is_enabled(settings),
        approved=switch.is_approved(settings),
        configured=bool(settings.read_provider_key()),
        health=await _read_record(store, PROVIDER_KEY, ProviderHealth),
    )
    return status.available and not _is_emergency_off(settings)


def _is_emergency_off(settings: Settings) -> bool:
    try:
        os.lstat(settings.emergency_off_file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it is unknown whether the file exists, so inference is off
    return True


async def _read_record(store: Store, key: str, kind: type[T]) -> T:
    return msgspec.json.decode(await store.get(key) or "{}", type=kind)


class Availability:
    """The status of inference in this process.

    `is_configured` returns whether there is a credential; `probe` sends the provider a GET /models.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        is_configured: Callable[[], bool],
        probe: Callable[[], Awaitable[ProviderSignal | None]],
    ) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store
        self._is_configured, self._probe = is_configured, probe
        self._switch: Switch | None = None
        self._health = ProviderHealth()
        self._status: InferenceStatus | None = None  # without the emergency-off file, which is checked each time
        self._signals: list[ProviderSignal] = []  # not written yet
        self._written = float("-inf")  # when this process last wrote the health, on the loop's clock
        self._refused = float("-inf")  # when it last wrote that the quota is used up
        self._recorder: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        # Two subscriptions, because in a cluster the two records may be on different nodes.
        registry.cache.subscribe(INFERENCE_KEY, self._reload_switch, self._doubt_switch)
        registry.cache.subscribe(PROVIDER_KEY, self._reload_health)

    # -- reading ---------------------------------------------------------------------------------------------

    def is_emergency_off(self) -> bool:
        return _is_emergency_off(self._settings)

    def status(self) -> InferenceStatus:
        """Returns the status. The emergency-off file needs no Redis.

        Without it, raises BackboneUnavailable until the switch has been read, and while it is in doubt.
        """
        if self.is_emergency_off():
            return InferenceStatus.DISABLED
        if self._status is None:
            raise BackboneUnavailable
        return self._status

    def is_provider_up(self) -> bool:
        """Returns the provider's last known health, independent of the switches."""
        health = self._health
        return not (health.refused or health.quota or health.failures >= FAILURES)

    def describe(self, status: InferenceStatus) -> InferenceState:
        """Raises BackboneUnavailable while the switch is not known."""
        return InferenceState(
            managedInference=status.available,
            managedInferenceStatus=status,
            enabled=self._enabled(),
            approved=self._approved(),
            emergencyOff=self.is_emergency_off(),
        )

    def _enabled(self) -> bool:
        if self._switch is None:
            raise BackboneUnavailable
        return self._switch.is_enabled(self._settings)

    def _approved(self) -> bool:
        if self._switch is None:
            raise BackboneUnavailable
        return self._switch.is_approved(self._settings)

    # -- changing --------------------------------------------------------------------------------------------

    async def reload(self) -> None:
        await self._reload_switch()
        await self._reload_health()

    async def _reload_switch(self) -> None:
        self._switch = await _read_record(self._store, INFERENCE_KEY, Switch)
        self._update_status()

    async def _reload_health(self) -> None:
        self._health = await _read_record(self._store, PROVIDER_KEY, ProviderHealth)
        self._update_status()

    def _doubt_switch(self) -> None:
        """Treats the switch as unknown: it was changed, perhaps to off, and cannot be read."""
        if self._switch is not None:
            logger.warning("inference.unknown", action="refuses requests until the switch can be read")
        self._switch = self._status = None

    async def change_switch(self, *, enabled: bool | None = None, approved: bool | None = None) -> InferenceStatus:
        """Changes the values that are not None, for all processes. Returns the new status."""

        async def compute(present: str) -> Change[None]:
            switch = msgspec.json.decode(present or "{}", type=Switch)
            switch = Switch(
                enabled=switch.enabled if enabled is None else enabled,
                approved=switch.approved if approved is None else approved,
            )
            return Change(msgspec.json.encode(switch).decode(), None)

        await change_record(self._store, INFERENCE_KEY, compute, subject="the switch")
        await self.reload()
        return self.status()

    def note_signal(self, signal: ProviderSignal) -> None:
        """Records a signal in the background. Writes nothing if the signal changes nothing."""
        if signal is ProviderSignal.QUOTA:
            self._note_refusal()
        # While a write is in progress, this process does not know the health that follows it.
        writing = self._recorder is not None and not self._recorder.done()
        if not writing and self._health.after(signal) == self._health:
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
            await self._store.client.set(REFUSAL_KEY, "1", px=round(REFUSAL_SECONDS * 1000))

    def check_credential(self) -> None:
        """Probes the provider after a request got a 401 or 403. Only a refusal of the probe counts."""
        if self._prober is None or self._prober.done():
            self._prober = asyncio.create_task(self._probe_and_note())

    async def keep_probing(self) -> None:
        """Probes the provider while it is down. One process does so at a time. Runs for the life of the process."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
            if not self._health.refused and self._health.failures < FAILURES:
                continue
            try:
                mine = await self._store.client.set(PROBE_KEY, str(os.getpid()), nx=True, ex=PROBE_LEASE_SECONDS)
            except BackboneUnavailable:
                continue
            if mine:
                await self._probe_and_note()

    async def _probe_and_note(self) -> None:
        if (signal := await self._probe()) is not None:
            self.note_signal(signal)

    async def _write_signals(self) -> None:
        """Writes the collected signals until none is left that changes anything."""
        loop = asyncio.get_running_loop()
        while self._signals:
            await asyncio.sleep(self._written + PUBLISH_INTERVAL_SECONDS - loop.time())
            signals, self._signals = self._signals, []
            with suppress(BackboneUnavailable):  # the next request reveals the same
                ends_quota = self._health.quota and signals[0] is ProviderSignal.COMPLETION
                if ends_quota and (left := await self._store.client.pttl(REFUSAL_KEY)) > 0:
                    self._signals = condense([*signals, *self._signals])
                    await asyncio.sleep(left / 1000)
                    continue
                await self._change_health(signals)
            if reduce(ProviderHealth.after, self._signals, self._health) == self._health:
                self._signals = []

    async def _change_health(self, signals: list[ProviderSignal]) -> None:
        async def compute(present: str) -> Change[tuple[ProviderHealth, bool]]:
            health = msgspec.json.decode(present or "{}", type=ProviderHealth)
            after = reduce(ProviderHealth.after, signals, health)
            changed = after != health
            return Change(msgspec.json.encode(after).decode() if changed else None, (after, changed))

        self._health, changed = await change_record(self._store, PROVIDER_KEY, compute, subject="the provider's health")
        if changed:
            self._written = asyncio.get_running_loop().time()
        self._update_status()

    def _update_status(self) -> None:
        if self._switch is None:
            return
        before = self._status
        self._status = derive_status(
            enabled=self._enabled(),
            approved=self._approved(),
            configured=self._is_configured(),
            health=self._health,
        )
        if before != self._status:
            logger.info("inference.status", status=self._status, before=before)
