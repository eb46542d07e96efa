"""Everything one gateway process holds, and the work that runs beside its requests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType

import structlog
from litestar import Litestar
from litestar.di import NamedDependency

from gateway.accounts.registry import Registry
from gateway.accounts.sessions import Sessions
from gateway.accounts.vault import Vault
from gateway.deploys.hooks import Hooks
from gateway.deploys.states import Deploys
from gateway.events.receivers import Webhooks
from gateway.inference.admission import Admission
from gateway.inference.availability import Availability
from gateway.inference.handler import Inference
from gateway.inference.provider import Provider
from gateway.inference.users import Users
from gateway.monitors.findings import Findings
from gateway.operations.overview import Overview, SnapshotFeed
from gateway.outbound import client as outbound
from gateway.server import end_overdue_connections
from gateway.settings import Settings
from gateway.store.client import Store
from gateway.telemetry.counters import Counters
from gateway.telemetry.metrics import Metrics

logger = structlog.get_logger()


class Gateway:
    """Everything one process holds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.store = Store(settings.redis_url)
        self.vault = Vault(settings.encryption_key)
        self.registry = Registry(self.store, self.vault)
        self.sessions = Sessions(self.store, settings.base_url)
        self.http = outbound.client(allow_private=settings.allow_private_addresses, ca_file=settings.ca_file or None)
        self.users = Users(settings, self.vault, self.http)
        self.admission = Admission(settings, self.store, self.metrics)
        self.webhooks = Webhooks(self.store, self.vault, allow_private=settings.allow_private_addresses)
        self.hooks = Hooks(settings, self.registry)
        self.deploys = Deploys(settings, self.registry)
        self.findings = Findings(settings, self.store)
        self.provider = Provider(settings)
        self.counters = Counters(self.store, lambda: len(self.provider.streams))
        self.availability = Availability(settings, self.registry, self.provider.has_key, self.provider.probe)
        self.inference = Inference(
            settings,
            self.registry,
            self.users,
            self.admission,
            self.provider,
            self.availability,
            self.metrics,
            self.counters,
        )
        self.overview = Overview(settings, self.registry, self.availability, self.counters, self.metrics)
        self.feed = SnapshotFeed(self.overview)
        self.draining = False

    def drain(self) -> None:
        """SIGTERM: nothing new; what runs gets its time, then ends at its bound."""
        if not self.draining:
            self.draining = True
            logger.info("gateway.draining", streams=len(self.provider.streams))
            asyncio.get_running_loop().call_later(self.settings.drain, self.provider.interrupt)

    def _drain_on_sigterm(self) -> Callable[[], object]:
        """In front of the server's own handler, whichever server it is; returns what takes it away again."""
        if threading.current_thread() is not threading.main_thread():
            return bool
        loop, servers = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.drain)
            if callable(servers):
                servers(number, frame)

        signal.signal(signal.SIGTERM, handle)
        return partial(signal.signal, signal.SIGTERM, servers)

    @asynccontextmanager
    async def running(self, _: Litestar) -> AsyncIterator[None]:
        work = [
            asyncio.create_task(run, name=str(run))
            for run in (
                self.registry.follow(),
                self.provider.sweep(self.metrics.open_streams.set),
                self.admission.keep_settling(),
                self.availability.keep_probing(),
                self.counters.keep_flushing(),
                self.overview.keep_gauges_fresh(),
                end_overdue_connections(),
                self.store.keep_looking(),
            )
        ]
        for task in work:
            task.add_done_callback(_must_not_end)
        # A process that takes requests before it has read the switch would refuse them.
        for _attempt in range(40):
            if self.registry.live:
                break
            await asyncio.sleep(0.05)
        # What is there now stays: the collector need not look at it again.
        gc.freeze()
        terminate = self._drain_on_sigterm()
        try:
            yield
        finally:
            terminate()
            try:
                async with asyncio.timeout(5):
                    await self.admission.settle_unwritten(at_last=True)
            except TimeoutError:
                logger.error("settlement.left", action="their leases end them at their bound")
            await self.counters.leave()
            for task in work:
                task.remove_done_callback(_must_not_end)
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self.provider.close()
            await self.http.aclose()
            await self.store.close()


Injected = NamedDependency[Gateway]  # how a route asks for it


def _must_not_end(task: asyncio.Task[None]) -> None:
    """The process cannot do without this task; it says so and ends, and its supervisor starts another."""
    error = None if task.cancelled() else task.exception()
    logger.critical("gateway.broken", task=task.get_name(), exc_info=error)
    os._exit(70)
