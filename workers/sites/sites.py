"""The worker that serves the hosted apps. It reads what to serve, and what to run, from the data folder alone
(`releases.py`), so that it goes on when Redis or the builder is away, and either is restarted without the other.

One process serves a folder; a second one waits for its end. TLS ends in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Literal

import structlog

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import ServiceError
from gateway.events.catalogue import AppCrashed
from gateway.events.receivers import Webhooks
from gateway.ids import new_id, now_iso
from gateway.settings import Settings
from gateway.store.client import Store
from workers.deploys.releases import Releases, alone
from workers.sandbox.sandbox import APP_USERS, Sandbox, Unsafe
from workers.sites import nginx, web
from workers.sites.watchdog import LIMITS, Watchdog

logger = structlog.get_logger()

TELLING = 300.0  # seconds after which a crash that can't be told is old news
OPEN_FILES = 65_536  # a request takes up to three
AGAIN = 1.0  # seconds between two looks at a port that somebody else has


async def run(settings: Settings) -> None:
    releases = Releases(Path(settings.data_dir))
    releases.open()
    folder = releases.folder
    (folder / "web").mkdir(mode=0o711, exist_ok=True)
    _open_many_files()
    # What is entered last is left first: answers that are under way end before the apps do.
    async with alone(folder / "sites.lock"), AsyncExitStack() as stack:
        crashes = await stack.enter_async_context(aclosing(Crashes(settings)))
        sandbox = Sandbox(development=settings.allow_private_addresses, users=APP_USERS)
        parts = []
        try:
            sandbox.check(folder)
        except Unsafe as error:
            logger.error("sites.no_start_commands", action=str(error))
        else:
            watchdog = Watchdog(folder, sandbox, crashes.tell, LIMITS)
            parts.append(await stack.enter_async_context(_beside(watchdog.run())))
        parts.append(await stack.enter_async_context(_front(settings, folder)))
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
        raise RuntimeError("nginx ended by itself")


@asynccontextmanager
async def _front(settings: Settings, folder: Path) -> AsyncIterator[asyncio.Task[object]]:
    """Gives what ends when the web server does."""
    await nginx.end_former(folder)
    host, port = await _free(settings)
    async with AsyncExitStack() as stack:
        ended: Coroutine[object, object, object]
        if settings.apps_server == "nginx" or (settings.apps_server == "auto" and nginx.usable(folder)):
            await stack.enter_async_context(web.serving(folder, socket=folder / "web" / "apps.sock"))
            ended = (await stack.enter_async_context(nginx.serving(folder, host, port))).wait()
        else:
            await stack.enter_async_context(web.serving(folder, host=host, port=port))
            ended = asyncio.Event().wait()
        (folder / "web" / "address").write_text(f"{_reached_at(host)}:{port}")
        logger.info("sites.serving", address=f"http://{host}:{port}", domain=settings.apps_domain)
        yield await stack.enter_async_context(_beside(ended))


@asynccontextmanager
async def _beside(work: Coroutine[object, object, object]) -> AsyncIterator[asyncio.Task[object]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _open_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))


def address(folder: Path) -> str:
    """Of the server that serves the data folder, or served it last; empty: none ever did."""
    try:
        return (folder / "web" / "address").read_text()
    except OSError:
        return ""


def _reached_at(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{host}]" if ":" in host else host


async def _free(settings: Settings) -> tuple[str, int]:
    """Waits for the port, because the process has other work too; for development another one does as well."""
    host, _, wanted = settings.apps_listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    choices = [int(wanted), *([0] if settings.allow_private_addresses else [])]
    waiting = False
    while True:
        for choice in choices:
            with contextlib.suppress(OSError), socket.create_server((host, choice), family=family) as found:
                return host, found.getsockname()[1]
        if not waiting:
            action = "free it, or set GATEWAY_APPS_LISTEN"
            logger.error("sites.port_taken", address=settings.apps_listen, action=action)
        waiting = True
        await asyncio.sleep(AGAIN)


class Crashes:
    """Tells accounts that an app of theirs ended."""

    def __init__(self, settings: Settings) -> None:
        self._store = Store(settings.redis_url)
        vault = Vault(settings.encryption_key)
        self._registry = Registry(self._store, vault)
        self._webhooks = Webhooks(self._store, vault, allow_private=settings.allow_private_addresses)
        self._telling: set[asyncio.Task[None]] = set()

    async def tell(self, app_id: str, reason: Literal["exit", "oom"], exit_code: int | None) -> None:
        """Not waited for: the app is started again meanwhile."""
        crash = AppCrashed(reason=reason, exitCode=exit_code, at=now_iso())
        task = asyncio.create_task(self._tell(app_id, crash))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, app_id: str, crash: AppCrashed) -> None:
        event_id = new_id("evt")
        try:
            async with asyncio.timeout(TELLING):
                while True:
                    try:
                        app = await self._registry.find(app_id)
                        if app is not None:
                            await self._webhooks.emit(app, crash, event_id)
                    except ServiceError:
                        await asyncio.sleep(1)
                    else:
                        return
        except TimeoutError:
            logger.error("app.crash_not_told", app=app_id, reason=crash.reason)

    async def aclose(self) -> None:
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        await self._store.close()
