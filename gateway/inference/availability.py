"""Whether inference is available, and why not.

Configuration (switch, approval, emergency-off file, credential) decides the flag; what was learnt of the provider
only explains the state, so that an outage never takes the endpoint's address out of builds. Both live in Redis and
are copied into every process; a process that has not read them yet answers as if Redis were away.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import backbone

log = structlog.get_logger()

FAILURES = 3  # attempts in a row that must fail before the provider counts as unreachable
PROBE_INTERVAL = 30.0  # seconds, while not operational


class Status(enum.StrEnum):
    DISABLED = "disabled"
    MISCONFIGURED = "misconfigured"
    QUOTA_EXHAUSTED = "quota-exhausted"
    PROVIDER_UNREACHABLE = "provider-unreachable"
    OPERATIONAL = "operational"

    @property
    def available(self) -> bool:
        return self not in (Status.DISABLED, Status.MISCONFIGURED)


class Seen(enum.Enum):
    """What an attempt or a probe showed of the provider."""

    COMPLETION = "an answer"
    REACHED = "a probe or a request was answered, if only with a refusal of this one request"
    FAILED = "no connection, or a 5xx"
    QUOTA = "402, or 429 naming quota or billing"
    REFUSED = "the credential was refused, and a probe confirmed it"


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    failures: int = 0
    quota: bool = False
    refused: bool = False


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """None: as the settings say."""

    enabled: bool | None = None
    approved: bool | None = None


class InferenceState(msgspec.Struct):
    """What operators see: the status, and the gates it follows from."""

    managedInference: bool
    managedInferenceStatus: Status
    enabled: bool
    approved: bool
    emergencyOff: bool


def learn(health: Health, seen: Seen) -> Health:
    match seen:
        case Seen.COMPLETION:
            return Health()
        case Seen.REACHED:
            # GET /models answers whatever the quota is: only a completion shows that there is some again.
            return Health(quota=health.quota)
        case Seen.FAILED:
            return msgspec.structs.replace(health, failures=min(health.failures + 1, FAILURES))
        case Seen.QUOTA:
            return Health(quota=True)
        case Seen.REFUSED:
            return Health(refused=True)


def status(*, enabled: bool, approved: bool, emergency_off: bool, usable: bool, health: Health) -> Status:
    """`usable`: the credential is there and the provider's address is one."""
    if not enabled or emergency_off or not approved:
        return Status.DISABLED
    if not usable or health.refused:
        return Status.MISCONFIGURED
    if health.quota:
        return Status.QUOTA_EXHAUSTED
    if health.failures >= FAILURES:
        return Status.PROVIDER_UNREACHABLE
    return Status.OPERATIONAL


def usable_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Availability:
    """`probe` asks the provider's GET /models; `has_key` tells whether there is a credential."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        has_key: Callable[[], bool],
        probe: Callable[[], Awaitable[Seen]],
    ) -> None:
        self._settings, self._registry, self._store = settings, registry, registry.store
        self._has_key, self._probe = has_key, probe
        self._usable_url = usable_url(settings.provider_url)
        self._switch: Switch | None = None
        self._health = Health()
        self._configured: Status | None = None
        self._running: set[asyncio.Task[None]] = set()
        registry.watch(keys.INFERENCE, self.reload)
        registry.watch(keys.PROVIDER, self.reload)

    # -- asking ----------------------------------------------------------------------------------------------

    def emergency_off(self) -> bool:
        try:
            os.lstat(self._settings.emergency_off_file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # it cannot be looked at: fail closed
        return True

    def status(self) -> Status:
        """Raises BackboneUnavailable before the switch was ever read."""
        if self._configured is None:
            raise BackboneUnavailable
        return Status.DISABLED if self.emergency_off() else self._configured

    def provider_up(self) -> bool:
        """As far as it is known; whatever the switches say."""
        health = self._health
        return not (health.refused or health.quota or health.failures >= FAILURES)

    def describe(self, status: Status) -> InferenceState:
        assert self._switch is not None
        return InferenceState(
            managedInference=status.available,
            managedInferenceStatus=status,
            enabled=self._pick(self._switch.enabled, self._settings.inference),
            approved=self._pick(self._switch.approved, self._settings.processing_approved),
            emergencyOff=self.emergency_off(),
        )

    def _recompute(self) -> None:
        if self._switch is None:
            return
        before, self._configured = (
            self._configured,
            status(
                enabled=self._pick(self._switch.enabled, self._settings.inference),
                approved=self._pick(self._switch.approved, self._settings.processing_approved),
                emergency_off=False,
                usable=self._usable_url and self._has_key(),
                health=self._health,
            ),
        )
        if before != self._configured:
            log.info("inference.status", status=self._configured, before=before)

    @staticmethod
    def _pick(said: bool | None, configured: bool) -> bool:
        return configured if said is None else said

    # -- changing --------------------------------------------------------------------------------------------

    async def reload(self) -> None:
        switch, health = await self._store.get(keys.INFERENCE), await self._store.get(keys.PROVIDER)
        self._switch = msgspec.json.decode(switch or "{}", type=Switch)
        self._health = msgspec.json.decode(health or "{}", type=Health)
        self._recompute()

    async def set(self, *, enabled: bool | None = None, approved: bool | None = None) -> Status:
        while True:
            before = await self._store.get(keys.INFERENCE)
            switch = msgspec.json.decode(before or "{}", type=Switch)
            switch = Switch(
                enabled=switch.enabled if enabled is None else enabled,
                approved=switch.approved if approved is None else approved,
            )
            after = msgspec.json.encode(switch).decode()
            if await self._store.change(keys.INFERENCE, after, expected=before or ""):
                await self.reload()
                return self.status()

    def see(self, seen: Seen) -> None:
        """Notes what an attempt showed, off the request's path; nothing is written while nothing changes."""
        if learn(self._health, seen) != self._health:
            self._start(self._learn(seen))

    def doubt_credential(self) -> None:
        """A request met a 401 or 403: only a second refusal, by a probe, counts."""
        self._start(self._probe_now())

    def _start(self, work: Awaitable[None]) -> None:
        if len(self._running) < 100:  # an outage under load: the first hundred tell enough
            task = asyncio.ensure_future(work)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _learn(self, seen: Seen) -> None:
        try:
            while True:
                before = await self._store.get(keys.PROVIDER)
                health = msgspec.json.decode(before or "{}", type=Health)
                after = learn(health, seen)
                if after == health or await self._store.change(
                    keys.PROVIDER, msgspec.json.encode(after).decode(), expected=before or ""
                ):
                    self._health = after
                    self._recompute()
                    return
        except BackboneUnavailable:
            pass  # the next attempt will tell again

    async def _probe_now(self) -> None:
        seen = await self._probe()
        if learn(self._health, seen) != self._health:
            await self._learn(seen)

    async def keep_probing(self) -> None:
        """Runs as long as the process; one process at a time asks the provider."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            if not self._health.refused and self._health.failures < FAILURES:
                continue
            try:
                with backbone():
                    mine = await self._store.client.set(keys.PROBE, str(os.getpid()), nx=True, ex=20)
            except BackboneUnavailable:
                continue
            if mine:
                await self._probe_now()
