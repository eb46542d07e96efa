"""Runs a gateway process: starts its background tasks, drains it on SIGTERM, and settles what is left at its end."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import structlog

from gateway import log
from gateway.cancellation import cancel
from gateway.inference.provider.connection import Interrupted
from gateway.loops import freeze_heap, ignore_late_lookups
from gateway.operations import layout
from gateway.operations.sealed import find_unopened
from gateway.redis.client import until_redis_answers
from gateway.server.connections import raise_connection_limit, sweep_connections
from gateway.services import Services
from gateway.storage import find_folder_fault
from gateway.telemetry import tracing

logger = structlog.get_logger()


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[None]:
    """Runs the application's lifespan: starts the background tasks, and ends them."""
    raise_connection_limit()
    ignore_late_lookups()
    _check_files(services)
    tasks = [*_start_background_tasks(services), asyncio.create_task(_check_secrets(services))]
    await _wait_for_switch(services)
    freeze_heap()
    try:
        with _draining_on_sigterm(services):
            yield
    finally:
        await _settle_at_last(services)
        services.metrics.count_queued()
        await services.counters.close()
        await services.registry.api_keys.write_uses()
        await _close(services, tasks)
        tracing.stop()
        log.WRITER.finish()


@contextmanager
def _draining_on_sigterm(services: Services) -> Iterator[None]:
    """Drains before the handler for SIGTERM of the server runs, whichever server it is."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals; tests run servers in other threads
        return
    loop, server_handler = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(drain, services)
        if callable(server_handler):
            server_handler(number, frame)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, server_handler)


def drain(services: Services) -> None:
    """Stops accepting requests. Running streams get `GATEWAY_DRAIN` seconds, then are interrupted."""
    if not services.process.draining:
        services.process.draining = True
        logger.info("gateway.draining", streams=services.providers.count_streams())
        asyncio.get_running_loop().call_later(services.settings.drain, _interrupt, services)


def _interrupt(services: Services) -> None:
    services.upstream.fail_waiting(Interrupted())
    services.providers.interrupt()


def _check_files(services: Services) -> None:
    """Logs a line for each faulty file. The process serves without them."""
    for provider in services.providers.all:
        if provider.settings.key_file and not provider.pool.is_configured():
            action = "write the key to this file, which GATEWAY_PROVIDER_KEY_FILE or the providers file names"
            logger.error("provider.no_key", provider=provider.name, file=provider.settings.key_file, action=action)
    if fault := find_folder_fault(Path(services.settings.data_dir)):
        action = "make this user the owner of the folder, or set GATEWAY_DATA_DIR; until then, nothing can be published"
        logger.error("data.not_writable", reason=fault, action=action)


def _start_background_tasks(services: Services) -> list[asyncio.Task[None]]:
    tasks = [
        asyncio.create_task(coroutine, name=str(coroutine))
        for coroutine in (
            _follow_changes(services),
            services.providers.run(),
            services.upstream.check_waiters(),
            services.upstream.end_suspended(),
            services.admission.repeat_settlements(),
            services.admission.repeat_recent(),
            services.budget.keep_reporting(),
            services.counters.keep_flushing(),
            services.registry.api_keys.keep_writing_uses(),
            services.overview.keep_gauges_fresh(),
            services.redis_health.keep_checking(),
            sweep_connections(services.metrics.count_ended_connections),
        )
    ]
    for task in tasks:
        task.add_done_callback(_end_process)
    return tasks


async def _follow_changes(services: Services) -> None:
    """Follows the changes of records, without which the process is not ready, once it may use the data."""
    await until_redis_answers(lambda: layout.upgrade_redis(services.store))
    await services.registry.cache.follow_changes()


async def _check_secrets(services: Services) -> None:
    """Lets the log and `/ready` say if no key opens some of the stored secrets. The process serves without them."""
    services.process.warning = await until_redis_answers(lambda: find_unopened(services.store, services.vault))


async def _wait_for_switch(services: Services) -> None:
    """Waits up to two seconds for the switch, because a process that has not read it refuses requests."""
    for _ in range(40):
        if services.registry.cache.is_current:
            return
        await asyncio.sleep(0.05)


async def _settle_at_last(services: Services) -> None:
    try:
        async with asyncio.timeout(5):
            await services.admission.settle_pending(final=True)
    except TimeoutError:
        logger.error("settlement.left", action="the monitors worker settles them at the full reservation")


async def _close(services: Services, tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.remove_done_callback(_end_process)
    await cancel(*tasks)
    await services.providers.close()
    await services.http.close()
    await services.apps_http.close()
    await services.store.close()


def _end_process(task: asyncio.Task[None]) -> None:
    """Exits because a background task has ended that the process needs. Its supervisor starts another process."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, layout.LayoutFault):
        logger.critical("layout.unusable", reason=str(error))
    else:
        logger.critical("gateway.broken", task=task.get_name(), exc_info=error)
    log.WRITER.drain()
    os._exit(layout.EXIT_CODE if isinstance(error, layout.LayoutFault) else 70)
