"""Runs the named workers, or all of them: `python -m workers [NAME …]`, the same as `capsule worker`.

`sites` always has a process of its own. Beside other workers it is a child process, which ends with its parent.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvloop

from gateway import log
from gateway.accounts.vault import Vault
from gateway.cancellation import cancel
from gateway.errors import BackboneUnavailable
from gateway.loops import freeze_heap, ignore_late_lookups, stop_at_hangup, until
from gateway.operations.layout import EXIT_CODE, CannotRun, prepare_data, upgrade_redis
from gateway.operations.redis_health import RedisHealth
from gateway.operations.sealed import find_unopened
from gateway.redis.client import Store, until_redis_answers
from gateway.settings import BadSettings, Settings, find_unread, load
from gateway.settings.addresses import find_kubernetes_fault
from gateway.storage import find_folder_fault
from gateway.telemetry import tracing
from workers.builds import builder
from workers.check import combine_names
from workers.child import keep_child, start_child, stop_with_parent
from workers.hosting import sites
from workers.monitors.run import run_monitors
from workers.restarts import keep_running
from workers.webhooks import sender

logger = structlog.get_logger()

WITHOUT_REDIS = ("deploys", "sites")  # these serve hosted apps even while Redis is unavailable
REDIS_CHECK_SECONDS = 1.0  # between checks whether Redis accepts writes


async def run_sites(settings: Settings) -> None:
    if settings.apps_engine == "kubernetes":
        if fault := find_kubernetes_fault():
            raise CannotRun(fault)
        if not settings.encryption_key:
            raise CannotRun("GATEWAY_ENCRYPTION_KEY: is missing; the tokens of the apps' pods are made from it")
        from workers.kubernetes import run  # imported here, because only this engine needs its client

        await run.run(settings)
    else:
        await sites.run(settings)


WORKERS: dict[str, Callable[[Settings], Coroutine[Any, Any, None]]] = {
    "webhooks": sender.run,
    "deploys": builder.run,
    "sites": run_sites,
    "monitors": run_monitors,
}


async def run_workers(settings: Settings, names: list[str], child: BaseProcess | None) -> None:
    """Runs until it is stopped. If one worker fails, the process ends, and its supervisor restarts it.

    Raises CannotRun.
    """
    ignore_late_lookups()
    with contextlib.suppress(BackboneUnavailable):  # `wait_for_redis` logs it
        await prepare_data(settings)
    stopped = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
    stop_with_parent(stopped)
    freeze_heap()
    logger.info("workers.started", workers=names)
    redis = asyncio.create_task(wait_for_redis(settings))
    running = [asyncio.create_task(_run_worker(name, settings, redis), name=name) for name in names]
    running.append(asyncio.create_task(_check_redis(settings, redis)))
    running += [asyncio.create_task(keep_child(child))] if child is not None else []
    stopping = asyncio.create_task(stopped.wait())
    done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    await cancel(stopping, redis, *running)
    logger.info("workers.stopped", workers=names)
    for task in done - {stopping}:
        task.result()


async def _run_worker(name: str, settings: Settings, redis: asyncio.Task[None]) -> None:
    if name not in WITHOUT_REDIS:
        await asyncio.shield(redis)
    await WORKERS[name](settings)


async def _check_redis(settings: Settings, redis: asyncio.Task[None]) -> None:
    """Logs when Redis becomes unavailable, and once if no key opens some of the stored secrets.

    Raises LayoutFault if it has data that these workers cannot use.
    """
    await asyncio.shield(redis)
    store = Store(settings.redis_url, ca_file=settings.ca_file)
    vault = Vault(settings.encryption_key)
    try:
        await asyncio.gather(
            RedisHealth(store).keep_checking(), until_redis_answers(lambda: find_unopened(store, vault))
        )
    finally:
        await store.close()


async def wait_for_redis(settings: Settings) -> None:
    """Waits until Redis accepts writes. Until then, the health check logs the reason and the remedy.

    Raises LayoutFault.
    """
    store = Store(settings.redis_url, ca_file=settings.ca_file)
    health = RedisHealth(store)

    async def is_ready() -> bool:
        with contextlib.suppress(BackboneUnavailable):
            await health.check()
            await upgrade_redis(store)
            return True
        return False

    try:
        await until(is_ready, REDIS_CHECK_SECONDS)
    finally:
        await store.close()


def main(names: list[str], *, restart: bool = False) -> int:
    """Runs the workers until they are stopped or fail. `restart`: starts them again when they fail."""
    unknown = [name for name in names if name not in WORKERS]
    if unknown:
        print(f"There is no worker {unknown[0]!r}. Choose from: {', '.join(WORKERS)}.", file=sys.stderr)
        return 2
    stop_at_hangup()
    try:
        for unread in find_unread():
            print(f"{unread.fault}; {unread.action}", file=sys.stderr)
        settings = load()
        names = combine_names(settings, names or list(WORKERS))
        _check_data_folder(settings, names)
    except BadSettings as error:
        print(f"The settings are invalid:\n{error}", file=sys.stderr)
        return 1
    if restart:
        kept = msgspec.structs.replace(settings, keep_serving=True)
        groups = [[name for name in names if name != "sites"], [name for name in names if name == "sites"]]
        return keep_running(settings, [partial(_run, kept, group) for group in groups if group])
    if "sites" in names and len(names) > 1:
        names = [name for name in names if name != "sites"]
        return _run(settings, names, start_child(_run, settings, ["sites"]))
    return _run(settings, names)


def _run(settings: Settings, names: list[str], child: BaseProcess | None = None) -> int:
    log.configure(settings)
    tracing.start("capsule-workers")
    try:
        uvloop.run(run_workers(settings, names, child))
    except CannotRun as fault:
        print(fault, file=sys.stderr)
        return EXIT_CODE
    finally:
        tracing.stop()
        log.WRITER.finish()  # a child process of `multiprocessing` ends without atexit
    return 0


def _check_data_folder(settings: Settings, names: list[str]) -> None:
    """Raises BadSettings if workers that need the data folder cannot write to it."""
    needed = "sites" in names or ("deploys" in names and settings.deploy_engine == "local")
    if needed and (fault := find_folder_fault(Path(settings.data_dir))):
        raise BadSettings(f"GATEWAY_DATA_DIR: {fault}; give the folder to the worker's user, or set another folder")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
