"""Builds the parts of one gateway process, and runs its background tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import structlog
from litestar import Litestar
from litestar.di import NamedDependency

from gateway import log
from gateway.accounts.app_changes import AppChanges
from gateway.accounts.changes import Changes
from gateway.accounts.custom_domains import CustomDomains
from gateway.accounts.operators import Operators
from gateway.accounts.pacing import Pacing
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import Sessions
from gateway.accounts.vault import Vault
from gateway.connections import raise_descriptor_limit, sweep_connections
from gateway.data.commands import DataCommands
from gateway.data.records import DataRecords
from gateway.deploys.actions import DeployActions
from gateway.deploys.environment import Environments
from gateway.deploys.hooks import Hooks
from gateway.deploys.runtime_log import RuntimeLog
from gateway.deploys.states import Deploys
from gateway.events.webhooks import Webhooks
from gateway.inference.auth.users import Users
from gateway.inference.availability import Availability
from gateway.inference.concurrency.permits import Permits
from gateway.inference.handler import Inference
from gateway.inference.provider.connection import Interrupted
from gateway.inference.provider.pool import Provider
from gateway.inference.spend.admission import Admission
from gateway.inference.spend.prices import PRICES
from gateway.memory import freeze_heap
from gateway.monitors.crashes import Crashes
from gateway.monitors.findings import Findings
from gateway.operations.audit import AuditTrail
from gateway.operations.directory import Directory
from gateway.operations.overview import Overview, SnapshotFeed
from gateway.operations.redis_health import RedisHealth
from gateway.outbound import client as outbound
from gateway.outbound.dns import Resolver
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import find_folder_fault, open_storage
from gateway.telemetry import tracing
from gateway.telemetry.counters import Counters
from gateway.telemetry.metrics import Metrics

logger = structlog.get_logger()


class Gateway:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(PRICES)
        self.store = Store(settings.redis_url, ca_file=settings.ca_file, replicas=settings.redis_wait)
        self.vault = Vault(settings.encryption_key)
        self.registry = Registry(self.store, self.vault)
        self.app_changes = AppChanges(self.registry)
        self.custom_domains = CustomDomains(self.registry, Resolver(settings.dns))
        self.directory = Directory(self.registry)
        self.sessions = Sessions(self.store, settings.base_url)
        self.operators = Operators(settings)
        self.pacing = Pacing()
        self.audit = AuditTrail(self.store)
        self.http = outbound.Client(
            allow_private=settings.allow_private_addresses,
            ca_file=settings.ca_file or None,
            own_domain=settings.apps_domain,
        )
        # The operator chooses these addresses, which may be private and without TLS.
        self.apps_http = outbound.Client(allow_private=True, ca_file=settings.ca_file or None, own=True)
        self.users = Users(settings, self.vault, self.http, self.store, self.apps_http)
        self.admission = Admission(settings, self.store, self.metrics)
        self.webhooks = Webhooks(self.store, self.vault, allow_private=settings.allow_private_addresses)
        self.hooks = Hooks(settings, self.registry)
        self.deploys = Deploys(settings, self.registry)
        self.deploy_actions = DeployActions(settings, self.deploys)
        self.storage = open_storage(settings)
        self.data, self.data_commands = DataRecords(self.store), DataCommands(self.store)
        self.environments = Environments(self.store, self.vault)
        self.runtime_log = RuntimeLog(settings.data_dir)
        self.findings = Findings(settings, self.store)
        self.crashes = Crashes(self.store, self.webhooks)
        self.provider = Provider(settings)
        self.permits = Permits(
            self.store,
            limit=settings.provider_concurrency,
            max_wait=settings.provider_wait,
            rate=settings.provider_rate,
            observe_wait=self.metrics.provider_wait.observe,
        )
        self.counters = Counters(self.store, lambda: len(self.provider.streams), self.metrics.unlogged_requests.inc)
        self.availability = Availability(settings, self.registry, self.provider.is_configured, self.provider.probe)
        self.inference = Inference(
            settings,
            self.registry,
            self.users,
            self.admission,
            self.permits,
            self.provider,
            self.availability,
            self.metrics,
            self.counters,
        )
        self.changes = Changes(self.registry, self.availability.status, self.metrics.viewers.set)
        self.overview = Overview(settings, self.registry, self.availability, self.permits, self.counters, self.metrics)
        self.feed = SnapshotFeed(self.overview)
        self.redis_health = RedisHealth(self.store, self.metrics.redis_up.set)
        self.draining = False

    def drain(self) -> None:
        """Stops accepting requests. Running streams get `GATEWAY_DRAIN` seconds, then are interrupted."""
        if not self.draining:
            self.draining = True
            logger.info("gateway.draining", streams=len(self.provider.streams))
            asyncio.get_running_loop().call_later(self.settings.drain, self._interrupt)

    def _interrupt(self) -> None:
        self.permits.fail_waiting(Interrupted())
        self.provider.interrupt()

    @contextmanager
    def _draining_on_sigterm(self) -> Iterator[None]:
        """Drains before the handler for SIGTERM of the server runs, whichever server it is."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals; tests run servers in other threads
            return
        loop, server_handler = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.drain)
            if callable(server_handler):
                server_handler(number, frame)

        signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, server_handler)

    @asynccontextmanager
    async def running(self, _: Litestar) -> AsyncIterator[None]:
        """Runs the application's lifespan: starts the background tasks, and ends them."""
        raise_descriptor_limit()
        self._check_files()
        tasks = self._start_background_tasks()
        await self._wait_for_switch()
        freeze_heap()
        try:
            with self._draining_on_sigterm():
                yield
        finally:
            await self._settle_at_last()
            self.metrics.count_queued()
            await self.counters.close()
            await self.registry.api_keys.write_uses()
            await self._close(tasks)
            tracing.stop()
            log.WRITER.finish()

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.remove_done_callback(_end_process)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.permits.close()
        self.provider.close()
        await self.http.close()
        await self.apps_http.close()
        await self.store.close()

    def _start_background_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [
            asyncio.create_task(coroutine, name=str(coroutine))
            for coroutine in (
                self.registry.cache.follow_changes(),
                self.permits.run(),
                self.inference.check_waiters(),
                self.inference.end_suspended(),
                self.provider.sweep(self.metrics.open_streams.set),
                self.admission.repeat_settlements(),
                self.admission.repeat_recent(),
                self.availability.keep_probing(),
                self.counters.keep_flushing(),
                self.registry.api_keys.keep_writing_uses(),
                self.overview.keep_gauges_fresh(),
                self.redis_health.keep_checking(),
                sweep_connections(self.metrics.count_ended_connections),
            )
        ]
        for task in tasks:
            task.add_done_callback(_end_process)
        return tasks

    async def _wait_for_switch(self) -> None:
        """Waits up to two seconds for the switch, because a process that has not read it refuses requests."""
        for _ in range(40):
            if self.registry.cache.is_current:
                return
            await asyncio.sleep(0.05)

    def _check_files(self) -> None:
        """Logs a line for each faulty file. The process serves without them."""
        if self.settings.provider_key_file and not self.provider.is_configured():
            action = (
                "write the key to the file in GATEWAY_PROVIDER_KEY_FILE, make it readable for this user, and restart"
            )
            logger.error("provider.no_key", file=self.settings.provider_key_file, action=action)
        if fault := find_folder_fault(Path(self.settings.data_dir)):
            action = (
                "make this user the owner of the folder, or set GATEWAY_DATA_DIR; until then, nothing can be published"
            )
            logger.error("data.not_writable", reason=fault, action=action)

    async def _settle_at_last(self) -> None:
        try:
            async with asyncio.timeout(5):
                await self.admission.settle_pending(final=True)
        except TimeoutError:
            logger.error("settlement.left", action="the monitors worker settles them at the full reservation")


Injected = NamedDependency[Gateway]  # the type of the routes' parameter `gateway`


def _end_process(task: asyncio.Task[None]) -> None:
    """Exits because a background task has ended that the process needs. Its supervisor starts another process."""
    error = None if task.cancelled() else task.exception()
    logger.critical("gateway.broken", task=task.get_name(), exc_info=error)
    log.WRITER.drain()
    os._exit(70)
