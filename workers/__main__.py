"""`python -m workers [NAME …]`, the same as `capsule worker`: runs the named workers, or all of them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

from gateway import log
from gateway.settings import BadSettings, Settings, load
from gateway.telemetry import tracing
from workers.check import combine_names
from workers.deploys import builder
from workers.monitors.run import run_monitors
from workers.sites import sites
from workers.webhooks import sender

logger = structlog.get_logger()

WORKERS: dict[str, Callable[[Settings], Coroutine[Any, Any, None]]] = {
    "webhooks": sender.run,
    "deploys": builder.run,
    "sites": sites.run,
    "monitors": run_monitors,
}


async def run_workers(settings: Settings, names: list[str]) -> None:
    """Runs until SIGTERM or Ctrl-C. If one worker fails, the process ends, and its supervisor restarts it."""
    stopped = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
    names = combine_names(settings, names)
    logger.info("workers.started", workers=names)
    running = [asyncio.create_task(WORKERS[name](settings), name=name) for name in names]
    stopping = asyncio.create_task(stopped.wait())
    done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in [stopping, *running]:
        task.cancel()
    await asyncio.gather(stopping, *running, return_exceptions=True)
    logger.info("workers.stopped", workers=names)
    for task in done - {stopping}:
        task.result()


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in WORKERS]
    if unknown:
        print(f"There is no worker {unknown[0]!r}; choose from: {', '.join(WORKERS)}.", file=sys.stderr)
        return 2
    try:
        settings = load()
    except BadSettings as error:
        print(f"The settings are wrong:\n{error}", file=sys.stderr)
        return 1
    log.configure(settings)
    tracing.start("capsule-workers")
    try:
        uvloop.run(run_workers(settings, names or list(WORKERS)))
    finally:
        tracing.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
