"""The worker that serves the hosted apps. Only the data folder determines which releases it serves and runs
(`workers/hosting/releases.py`). So the worker works without Redis and the builder, and restarts independently of them.
With shared storage, `host_agent.py` updates the data folder.

One process per data folder serves, and a second one stands by. A proxy in front of it must terminate TLS.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import ServiceError
from gateway.events.catalog import AppCrashed
from gateway.events.webhooks import Webhooks
from gateway.ids import new_id, now_iso
from gateway.monitors.crashes import Crashes
from gateway.redis.client import Store
from gateway.settings import Settings
from workers.heartbeat import keep_heartbeat
from workers.hosting import nginx, web
from workers.hosting.host_agent import HostAgent
from workers.hosting.limits import open_files
from workers.hosting.releases import Releases, exclusive_lock
from workers.hosting.serving import Serving
from workers.hosting.watchdog import LIMITS, Watchdog
from workers.hosting.web import read_address as read_address
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import APP_USERS, open_sandbox

logger = structlog.get_logger()

REPORT_SECONDS = 300.0  # after which a crash that can't be reported is dropped
RETRY_SECONDS = 1.0


async def run(settings: Settings) -> None:
    releases = Releases(Path(settings.data_dir))
    releases.create_folders()
    folder = releases.folder
    (folder / "web").mkdir(mode=0o711, exist_ok=True)
    _open_many_files()
    # The stack closes the last part first, so requests in progress end before the apps.
    async with exclusive_lock(folder / "sites.lock"), AsyncExitStack() as stack:
        reporter = await stack.enter_async_context(aclosing(CrashReporter(settings)))
        await stack.enter_async_context(_run_in_background(keep_heartbeat(reporter.store, "sites")))
        sandbox = open_sandbox(settings, APP_USERS)
        parts = []
        try:
            await asyncio.to_thread(sandbox.check, folder)
        except Unsafe as error:
            logger.error("sites.no_start_commands", action=str(error))
        else:
            vault = Vault(settings.encryption_key)
            watchdog = Watchdog(folder, sandbox, reporter.report, LIMITS, vault)
            parts.append(await stack.enter_async_context(_run_in_background(watchdog.run())))
        is_current: Callable[[], bool] = _always
        if settings.storage_url:
            agent = await stack.enter_async_context(aclosing(HostAgent(settings)))
            await agent.catch_up()
            parts.append(await stack.enter_async_context(_run_in_background(agent.run())))
            is_current = agent.is_current
        else:
            serving = Serving(settings, reporter.registry.find_app, builds=False)
            await stack.enter_async_context(_run_in_background(serving.undo_overdue()))
        parts.append(await stack.enter_async_context(_serve(settings, folder, is_current)))
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
        raise RuntimeError("nginx ended unexpectedly")


def _always() -> bool:
    return True


@asynccontextmanager
async def _serve(
    settings: Settings, folder: Path, is_current: Callable[[], bool]
) -> AsyncIterator[asyncio.Task[object]]:
    """Serves the apps. Yields a task that ends when the web server ends."""
    apps = partial(web.serve, folder, apps_domain=settings.apps_domain.partition(":")[0], is_current=is_current)
    await nginx.stop_former(folder)
    host, port = await _find_port(settings)
    async with AsyncExitStack() as stack:
        ended: Coroutine[object, object, object]
        if settings.apps_server == "nginx" or (settings.apps_server == "auto" and nginx.is_usable(folder)):
            await stack.enter_async_context(apps(socket=folder / "web" / "apps.sock"))
            ended = (await stack.enter_async_context(nginx.serve(folder, host, port))).wait()
        else:
            await stack.enter_async_context(apps(host=host, port=port))
            ended = asyncio.Event().wait()
        (folder / "web" / "address").write_text(f"{_connectable_host(host)}:{port}")
        logger.info("sites.serving", address=f"http://{host}:{port}", domain=settings.apps_domain)
        yield await stack.enter_async_context(_run_in_background(ended))


@asynccontextmanager
async def _run_in_background(work: Coroutine[object, object, object]) -> AsyncIterator[asyncio.Task[object]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _open_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, open_files(hard=True)), hard))


def _connectable_host(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host else host


async def _find_port(settings: Settings) -> tuple[str, int]:
    """Waits until the port is free. In development, use another port instead."""
    host, _, wanted = settings.apps_listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    choices = [int(wanted), *([0] if settings.allow_private_addresses else [])]
    waiting = False
    reason = ""
    while True:
        for choice in choices:
            try:
                with socket.create_server((host, choice), family=family) as server:
                    return host, server.getsockname()[1]
            except OSError as error:
                reason = os.strerror(error.errno or 0)
        if not waiting:
            action = "free the address, or set GATEWAY_APPS_LISTEN"
            logger.error("sites.port_taken", address=settings.apps_listen, reason=reason, action=action)
        waiting = True
        await asyncio.sleep(RETRY_SECONDS)


class CrashReporter:
    """Sends `app.crashed` events, and records crashes for the app's page."""

    def __init__(self, settings: Settings) -> None:
        self.store = Store(settings.redis_url, ca_file=settings.ca_file)
        vault = Vault(settings.encryption_key)
        self.registry = Registry(self.store, vault)
        webhooks = Webhooks(self.store, vault, allow_private=settings.allow_private_addresses)
        self._crashes = Crashes(self.store, webhooks)
        self._reporting: set[asyncio.Task[None]] = set()

    async def report(
        self, app_id: str, reason: Literal["exit", "oom"], exit_code: int | None, lines: list[str]
    ) -> None:
        """Reports a crash in the background, so that the app restarts at once. `lines`: the last of its output."""
        crash = AppCrashed(reason=reason, exitCode=exit_code, at=now_iso())
        task = asyncio.create_task(self._report(app_id, crash, lines))
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _report(self, app_id: str, crash: AppCrashed, lines: list[str]) -> None:
        event_id = new_id("evt")
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                while True:
                    try:
                        app = await self.registry.find_app(app_id)
                        if app is not None:
                            await self._crashes.report(app, crash, event_id, lines)
                    except ServiceError:
                        await asyncio.sleep(RETRY_SECONDS)
                    else:
                        return
        except TimeoutError:
            logger.error("app.crash_not_reported", app=app_id, reason=crash.reason)

    async def aclose(self) -> None:
        for task in self._reporting:
            task.cancel()
        await asyncio.gather(*self._reporting, return_exceptions=True)
        await self.store.close()
