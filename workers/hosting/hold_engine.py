"""Holds the place of the one engine that serves the apps: a host, or a cluster's worker (`workers/kubernetes/run.py`).

A host is its data folder: the next worker on it takes it over at once, because only one works on a folder. If
another engine holds it, a host ends: there is no second host, and beyond one machine Kubernetes serves the apps.

Failure policy: open. While Redis is unavailable, a host serves what it has. It learns when Redis answers again whether
another one has taken over meanwhile.
"""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import structlog

from gateway.cancellation import end_if_canceled
from gateway.deploys.serving import ELSEWHERE, Holder, Records
from gateway.errors import BackboneUnavailable
from gateway.operations.layout import CannotRun

logger = structlog.get_logger()

RENEWAL_SECONDS = 3.0
FOLDER_POLL_SECONDS = 1.0  # between looks whether the apps are in this data folder by now
LEAVE_SECONDS = 2.0  # in which a worker that stops gives it up


class ServedElsewhere(CannotRun):
    """Another engine serves the apps."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(
            f"The apps are served by {holder.name}, and one host serves them all. To serve them from here, stop the "
            "`sites` worker there first; to serve them from several machines, use Kubernetes (docs/kubernetes.md)."
        )


class HostHold:
    def __init__(
        self,
        records: Records,
        folder: Path,
        host: str,
        *,
        renewal_seconds: float = RENEWAL_SECONDS,
        folder_poll_seconds: float = FOLDER_POLL_SECONDS,
    ) -> None:
        """`folder`: the data folder. `host`: its id."""
        self._renewal_seconds, self._folder_poll_seconds = renewal_seconds, folder_poll_seconds
        self._records = records
        self._holder = Holder(host, f"the host {socket.gethostname()} (data folder {folder})")
        self.is_elsewhere = False  # whether the apps are in another data folder, so that this host follows no records

    async def take(self) -> None:
        """Takes or keeps the place, unless Redis is unavailable. Raises ServedElsewhere."""
        with suppress(BackboneUnavailable):
            holder = await self._records.hold_engine(self._holder)
            if holder is not None and holder.id != self._holder.id:
                raise ServedElsewhere(holder)
            if holder is None and not self.is_elsewhere:
                logger.warning("sites.elsewhere", action=ELSEWHERE)
            self.is_elsewhere = holder is None

    async def keep(self) -> None:
        """Keeps the place until canceled. Raises ServedElsewhere when another engine has it."""
        while True:
            await asyncio.sleep(self._folder_poll_seconds if self.is_elsewhere else self._renewal_seconds)
            end_if_canceled()
            await self.take()

    async def until_here(self) -> None:
        """Waits until the apps are in this host's data folder."""
        while self.is_elsewhere:
            await asyncio.sleep(self._folder_poll_seconds / 4)
            end_if_canceled()

    async def leave(self) -> None:
        with suppress(BackboneUnavailable, TimeoutError):
            await asyncio.wait_for(self._records.leave_engine(self._holder), LEAVE_SECONDS)
