"""The worker that decides what this host serves: it runs Caddy (`caddy.py`) and the apps (`watchdog.py`).

Only the data folder determines which releases are served and run (`releases.py`). So the worker works without Redis and
the builder, and restarts independently of them. `workers/engine` updates the data folder when a builder wants it. Caddy
and the apps keep running while the worker is stopped, and the next worker adopts them.

One process per data folder works, and a second one stands by. One engine serves the apps (`hold_engine.py`): on
another host, the worker ends, and so do Caddy and the apps that an earlier worker has left there.
"""

import asyncio
import os
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import structlog

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import RunningTasks, end_if_canceled, finish_despite_cancellation, run_in_background
from gateway.deploys.previews import Previews
from gateway.deploys.serving import Records
from gateway.events.catalog import AppCrashed
from gateway.events.webhooks import Webhooks
from gateway.ids import new_id, now_iso, time_of
from gateway.loops import raise_descriptor_limit, until
from gateway.monitors.crashes import Crashes
from gateway.redis.client import Store, patient
from gateway.settings import Settings
from workers.engine.data import DataAgent
from workers.engine.names import find_app, find_apps, follow_changes, list_apps
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps
from workers.engine.visits import keep_noting_visits
from workers.heartbeat import keep_heartbeat
from workers.hosting import caddy
from workers.hosting.caddy import Caddy, NoCaddy
from workers.hosting.data import HostData
from workers.hosting.driver import HostDriver
from workers.hosting.hold_engine import HostHold, ServedElsewhere
from workers.hosting.host_watch import HostWatch
from workers.hosting.releases import Releases, exclusive_lock
from workers.hosting.sleep_limits import SleepLimits
from workers.hosting.suspensions import Suspensions
from workers.hosting.watchdog import LIMITS, Watchdog, stop_apps
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import APP_USERS, MIB, open_sandbox

logger = structlog.get_logger()

REPORT_SECONDS = 300.0  # after which a crash that can't be reported is dropped
RETRY_SECONDS = 1.0
NO_CADDY_SECONDS = 10.0  # between attempts to start Caddy


async def run(settings: Settings) -> None:
    """Raises ServedElsewhere."""
    releases = Releases(Path(settings.data_dir))
    releases.create_folders()
    raise_descriptor_limit()
    async with exclusive_lock(releases.folder / "sites.lock"):
        try:
            await _run(settings, releases)
        except ServedElsewhere:
            await caddy.stop(releases.folder)
            await stop_apps(releases.folder)
            raise


async def _run(settings: Settings, releases: Releases) -> None:
    folder, shares = releases.folder, bool(settings.storage_url)
    async with AsyncExitStack() as stack:
        reporter = await stack.enter_async_context(aclosing(CrashReporter(settings)))
        store, registry, host = reporter.store, reporter.registry, releases.folder_id()
        await stack.enter_async_context(run_in_background(keep_heartbeat(store, "sites")))
        records = Records(store, "" if shares else host)
        hold = HostHold(records, folder, host)
        await hold.take()
        stack.push_async_callback(hold.leave)
        sandbox, data = open_sandbox(settings, APP_USERS), None
        parts = list[asyncio.Task[object]]()

        async def start(part: Coroutine[object, object, object]) -> None:
            parts.append(await stack.enter_async_context(run_in_background(part)))

        await start(hold.keep())
        suspensions = Suspensions(store, releases)
        await suspensions.catch_up()  # before any app runs
        try:
            await asyncio.to_thread(sandbox.check, folder)
        except Unsafe as error:
            logger.error("sites.no_start_commands", action=str(error))
        else:
            data = HostData(settings, registry, sandbox)
            await data.catch_up()
            vault = Vault(settings.encryption_key)
            sleep = SleepLimits(registry, settings.app_sleep)
            first_limit = max(settings.app_data.values()) * MIB  # the plan's limit follows within seconds
            watchdog = Watchdog(folder, sandbox, reporter.report, LIMITS, vault, sleep.find, first_limit)
            await start(watchdog.run())
            await start(DataAgent(registry, data).run())
        find = partial(find_app, registry)
        driver = HostDriver(settings, suspensions.mark, None if data is None else data.bring)
        steps = ReleaseSteps(driver, find, partial(find_apps, registry), settings)
        reconciler = Reconciler(records, steps, find, settings.canary)
        await stack.enter_async_context(aclosing(reconciler))
        await driver.open()
        if shares:  # visitors of a host that was empty would get 404
            await reconciler.catch_up()
        await start(_follow(hold, reconciler))
        await start(HostWatch(settings, store, releases, reconciler, hold).run())
        first = await list_apps(store) - releases.list_apps().keys()
        await start(follow_changes(store, steps.names.follow_app, first=first, on_step=reconciler.look_soon))
        await start(suspensions.run())
        await start(keep_noting_visits(Previews(store, records), driver))
        await start(_run_caddy(settings, folder))
        if data is not None:
            stack.push_async_exit(partial(_leave, data))
        end_if_canceled()  # a step above may have lost it
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()


async def _leave(data: HostData, kind: type[BaseException] | None, *_: object) -> None:
    """Keeps the apps' data when the worker is stopped, which cancels it."""
    if kind is not None and issubclass(kind, asyncio.CancelledError):
        await data.leave()


async def _follow(hold: HostHold, reconciler: Reconciler) -> None:
    await hold.until_here()
    await reconciler.run()


async def _run_caddy(settings: Settings, folder: Path) -> NoReturn:
    """Adopts the Caddy that runs, or starts one, and starts another one whenever it ends."""
    server = Caddy(settings, folder)
    try:
        while True:
            try:
                if not await server.adopt():
                    await server.start(await listen(settings))
            except NoCaddy as error:
                logger.error("sites.no_caddy", action=str(error))
                await asyncio.sleep(NO_CADDY_SECONDS)
                continue
            logger.info("sites.serving", address=caddy.read_address(folder), domain=settings.apps_domain)
            await server.wait_for_end()
            logger.error("sites.caddy_ended", action="another one is being started")
    finally:
        if not settings.keep_serving:
            await finish_despite_cancellation(server.stop())


async def listen(settings: Settings) -> socket.socket:
    """Waits until the port is free, and listens there. In development, listens at another port instead."""
    host, _, wanted = settings.apps_listen.rpartition(":")
    choices = [int(wanted), *([0] if settings.allow_private_addresses else [])]
    waiting = False

    async def try_to_listen() -> socket.socket | None:
        nonlocal waiting
        reason = ""
        for choice in choices:
            try:
                return caddy.open_listener(host.strip("[]"), choice)
            except OSError as error:
                reason = os.strerror(error.errno or 0)
        if not waiting:
            action = "free the address, or set GATEWAY_APPS_LISTEN"
            logger.error("sites.port_taken", address=settings.apps_listen, reason=reason, action=action)
        waiting = True
        return None

    listener = await until(try_to_listen, RETRY_SECONDS)
    assert listener is not None
    return listener


class CrashReporter:
    """Sends `app.crashed` events, and records crashes for the app's page."""

    def __init__(self, settings: Settings) -> None:
        self.store = Store(settings.redis_url, ca_file=settings.ca_file)
        vault = Vault(settings.encryption_key)
        self.registry = Registry(self.store, vault)
        webhooks = Webhooks(self.store, vault, allow_private=settings.allow_private_addresses)
        self._crashes = patient(Crashes(self.store, webhooks))
        self._reporting = RunningTasks()

    async def report(
        self,
        app_id: str,
        reason: Literal["exit", "oom"],
        exit_code: int | None,
        lines: list[str],
        event_id: str = "",
    ) -> None:
        """Reports a crash in the background, so that the app restarts at once. `lines`: the last of its output.

        With an `event_id`, which tells the time of the crash, one that is known already is not reported again.
        """
        at = time_of(event_id)
        crash = AppCrashed(reason=reason, exitCode=exit_code, at=now_iso(None if at is None else at / 1000))
        self._reporting.start(self._report(app_id, crash, lines, event_id))

    async def _report(self, app_id: str, crash: AppCrashed, lines: list[str], known_id: str) -> None:
        event_id = known_id or new_id("evt")
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                app = await patient(self.registry).find_app(app_id)
                if app is None:
                    return
                if not (known_id and await self._crashes.has(app, known_id)):
                    await self._crashes.report(app, crash, event_id, lines)
        except TimeoutError:
            logger.error("app.crash_not_reported", app=app_id, reason=crash.reason)

    async def aclose(self) -> None:
        await self._reporting.cancel()
        await self.store.close()
