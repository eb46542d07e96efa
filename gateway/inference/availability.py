"""Determines whether inference is available, and if not, why.

Configuration (the switch, the approval, the emergency-off file, the credentials) decides whether inference is
available. The health of the providers (`health.py`) only refines the status, so an outage never removes the endpoint's
address from builds. The switch is a record in Redis, and every process keeps a copy. Until a process has read it, it
responds as if Redis were unreachable.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.inference.health import Health, ProviderStatus, read_health
from gateway.keys import INFERENCE_KEY
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.settings import Settings

logger = structlog.get_logger()

PATH_CHECK_SECONDS = 0.05  # between two checks whether the path of the emergency-off file can be read


class InferenceStatus(enum.StrEnum):
    DISABLED = "disabled"
    MISCONFIGURED = "misconfigured"
    QUOTA_EXHAUSTED = "quota-exhausted"
    PROVIDER_UNREACHABLE = "provider-unreachable"
    OPERATIONAL = "operational"

    def __init__(self, value: str) -> None:
        self.available = value not in ("disabled", "misconfigured")


class Switch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The runtime switch and the approval, of which None leaves the value to the settings, and the disabled providers.

    Providers are switched off here, so that whoever can read whether inference is on knows of all of them.
    """

    enabled: bool | None = None
    approved: bool | None = None
    disabled: tuple[str, ...] = ()  # names of providers

    def is_enabled(self, settings: Settings) -> bool:
        return settings.inference if self.enabled is None else self.enabled

    def is_approved(self, settings: Settings) -> bool:
        return settings.processing_approved if self.approved is None else self.approved

    def derive_status(self, settings: Settings, providers: dict[str, ProviderStatus]) -> InferenceStatus:
        """Derives the status from those of all providers, by name: it is that of the best one that is enabled."""
        enabled = [status for name, status in providers.items() if name not in self.disabled]
        if not enabled or not self.is_enabled(settings) or not self.is_approved(settings):
            return InferenceStatus.DISABLED
        return InferenceStatus(max(enabled, key=lambda status: status.rank))


class InferenceState(msgspec.Struct):
    """The status, and the gates that determine it, for operators."""

    managedInference: bool
    managedInferenceStatus: InferenceStatus
    enabled: bool
    approved: bool
    emergencyOff: bool


async def is_offered(settings: Settings, store: Store) -> bool:
    """Returns whether apps may use inference, for a process that calls no provider. Raises BackboneUnavailable."""
    switch = await _read_switch(store)
    statuses = {
        each.name: (await read_health(store, each.name)).status(configured=bool(each.read_key()))
        for each in settings.providers
    }
    return switch.derive_status(settings, statuses).available and not is_emergency_off(settings)


def is_emergency_off(settings: Settings) -> bool:
    try:
        os.lstat(settings.emergency_off_file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it is unknown whether the file exists, so inference is off
    return True


async def _read_switch(store: Store) -> Switch:
    return msgspec.json.decode(await store.get(INFERENCE_KEY) or "{}", type=Switch)


class Availability:
    """The status of inference in this process."""

    def __init__(self, settings: Settings, registry: Registry, healths: Sequence[Health]) -> None:
        self._settings, self._store = settings, registry.store
        self._healths = {health.provider: health for health in healths}
        self._switch: Switch | None = None
        self._reads = self._last_read = 0  # of the switch: those that have begun, and the number of the last one used
        self._status: InferenceStatus | None = None  # without the emergency-off file, which is checked each time
        self._emergency_off = False  # at the last full check
        self._emergency_check_due = 0.0  # monotonic seconds
        self.changes = 0  # how often the switch or a health may have changed; who keeps a choice compares it
        self.status_changes = 0  # how often the status has changed; it tells whether it was another one in between
        registry.cache.subscribe(INFERENCE_KEY, self._reload_switch, self._doubt_switch)
        for health in healths:
            health.on_change = self._update_status

    # -- reading ---------------------------------------------------------------------------------------------

    def is_emergency_off(self) -> bool:
        """Returns whether the emergency-off file exists, or cannot be looked for.

        A request checks twice, and the error for a missing file would cost it as much as relaying two tokens. `access`
        raises none, but it does not tell a missing file from a path that cannot be read.
        """
        if os.access(self._settings.emergency_off_file, os.F_OK, follow_symlinks=False):
            return True
        if (now := time.monotonic()) >= self._emergency_check_due:
            self._emergency_check_due = now + PATH_CHECK_SECONDS
            self._emergency_off = is_emergency_off(self._settings)
        return self._emergency_off

    def status(self) -> InferenceStatus:
        """Returns the status. The emergency-off file needs no Redis.

        Without it, raises BackboneUnavailable until the switch has been read, and while it is in doubt.
        """
        if self.is_emergency_off():
            return InferenceStatus.DISABLED
        if self._status is None:
            raise BackboneUnavailable
        return self._status

    def is_enabled(self, provider: str) -> bool:
        """Returns whether an operator lets requests go to the provider. Raises BackboneUnavailable."""
        return provider not in self._known_switch().disabled

    def describe(self, status: InferenceStatus) -> InferenceState:
        """Raises BackboneUnavailable while the switch is not known."""
        switch = self._known_switch()
        return InferenceState(
            managedInference=status.available,
            managedInferenceStatus=status,
            enabled=switch.is_enabled(self._settings),
            approved=switch.is_approved(self._settings),
            emergencyOff=self.is_emergency_off(),
        )

    def _known_switch(self) -> Switch:
        if self._switch is None:
            raise BackboneUnavailable
        return self._switch

    # -- changing --------------------------------------------------------------------------------------------

    async def reload(self) -> None:
        await self._reload_switch()
        for health in self._healths.values():
            await health.reload()

    async def _reload_switch(self) -> None:
        self._reads += 1
        number = self._reads
        switch = await _read_switch(self._store)
        if number > self._last_read:  # otherwise a later read was answered first, and has a newer switch
            self._last_read, self._switch = number, switch
            self._update_status()

    def _doubt_switch(self) -> None:
        """Treats the switch as unknown: it was changed, perhaps to off, and cannot be read."""
        if self._switch is not None:
            logger.warning("inference.unknown", action="refuses requests until the switch can be read")
        self._switch = self._status = None
        self.changes += 1

    async def change_switch(
        self, *, enabled: bool | None = None, approved: bool | None = None, providers: dict[str, bool] | None = None
    ) -> InferenceStatus:
        """Changes the values that are not None, for all processes. Returns the new status.

        `providers` are names, and whether requests may go to them.
        """

        async def compute(present: str) -> Change[None]:
            switch = msgspec.json.decode(present or "{}", type=Switch)
            states = {**dict.fromkeys(switch.disabled, False), **(providers or {})}
            switch = Switch(
                enabled=switch.enabled if enabled is None else enabled,
                approved=switch.approved if approved is None else approved,
                disabled=tuple(sorted(name for name, is_enabled in states.items() if not is_enabled)),
            )
            return Change(msgspec.json.encode(switch).decode(), None)

        await change_record(self._store, INFERENCE_KEY, compute, subject="the switch")
        await self.reload()
        return self.status()

    def _update_status(self) -> None:
        self.changes += 1
        if self._switch is None:
            return
        before = self._status
        statuses = {name: health.status for name, health in self._healths.items()}
        self._status = self._switch.derive_status(self._settings, statuses)
        if before != self._status:
            self.status_changes += 1
            logger.info("inference.status", status=self._status, before=before)
