"""The worker that decides what this host serves: it runs Caddy (`caddy.py`) and the apps (`watchdog.py`).

Only the data folder determines which releases are served and run (`releases.py`). So the worker works without Redis and
the builder, and restarts independently of them. `host_agent.py` updates the data folder when a builder wants it. Caddy
and the apps keep running while the worker is stopped, and the next worker adopts them.

One process per data folder works, and a second one stands by.
"""

import asyncio
import os
import resource
import socket
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import structlog

from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.cancellation import end_if_canceled, finish_despite_cancellation, run_in_background
from gateway.deploys.serving import Records
from gateway.deploys.states import Deploys
from gateway.errors import ServiceError
from gateway.events.catalog import AppCrashed
from gateway.events.webhooks import Webhooks
from gateway.ids import new_id, now_iso, time_of
from gateway.monitors.crashes import Crashes
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import open_storage
from workers.heartbeat import keep_heartbeat
from workers.hosting import caddy
from workers.hosting.caddy import Caddy, NoCaddy
from workers.hosting.data_agent import DataAgent
from workers.hosting.host_agent import HostAgent
from workers.hosting.host_watch import HostWatch
from workers.hosting.ownership import AlwaysOwner, Owner, Ownership
from workers.hosting.packing import DataPacker
from workers.hosting.releases import Releases, exclusive_lock
from workers.hosting.serving import Serving, find_app, follow_changes
from workers.hosting.sleep import SleepLimits
from workers.hosting.suspensions import Suspensions
from workers.hosting.watchdog import LIMITS, Watchdog
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import APP_USERS, MIB, open_sandbox

logger = structlog.get_logger()

REPORT_SECONDS = 300.0  # after which a crash that can't be reported is dropped
RETRY_SECONDS = 1.0
NO_CADDY_SECONDS = 10.0  # between attempts to start Caddy
BACKLOG = 4_096  # connections that wait to be accepted
MOST_FILES = 65_536  # that the worker and Caddy open, where the machine sets no limit


async def run(settings: Settings) -> None:
    releases = Releases(Path(settings.data_dir))
    releases.create_folders()
    folder = releases.folder
    _open_many_files()
    async with exclusive_lock(folder / "sites.lock"), AsyncExitStack() as stack:
        reporter = await stack.enter_async_context(aclosing(CrashReporter(settings)))
        await stack.enter_async_context(run_in_background(keep_heartbeat(reporter.store, "sites")))
        sandbox = open_sandbox(settings, APP_USERS)
        parts, packer = [], None
        suspensions = Suspensions(reporter.store, releases)
        await suspensions.catch_up()  # before any app runs
        try:
            await asyncio.to_thread(sandbox.check, folder)
        except Unsafe as error:
            logger.error("sites.no_start_commands", action=str(error))
        else:
            vault = Vault(settings.encryption_key)
            sleep = SleepLimits(reporter.registry, settings.app_sleep)
            first_limit = max(settings.app_data.values()) * MIB  # the plan's limit follows within seconds
            shares = bool(settings.storage_url)
            watchdog = Watchdog(
                folder, sandbox, reporter.report, LIMITS, vault, sleep.find, first_limit, shares_apps=shares
            )
            parts.append(await stack.enter_async_context(run_in_background(watchdog.run())))
            packer = DataPacker(settings, reporter.registry, sandbox)
        agent, serving, owner = make_agent(settings, reporter.registry, releases, packer, suspensions)
        await stack.enter_async_context(aclosing(agent))
        await serving.open()
        parts.append(await stack.enter_async_context(run_in_background(owner.run())))
        if packer is not None:
            data_agent = DataAgent(settings, reporter.registry, packer, owner.has_data)
            parts.append(await stack.enter_async_context(run_in_background(data_agent.run())))
        if owner.is_alone:
            serving.set_current(True)
        else:
            await agent.catch_up()
        parts.append(await stack.enter_async_context(run_in_background(agent.run())))
        watch = HostWatch(settings, reporter.store, releases, agent)
        parts.append(await stack.enter_async_context(run_in_background(watch.run())))
        parts.append(
            await stack.enter_async_context(run_in_background(follow_changes(reporter.store, serving.follow_app)))
        )
        parts.append(await stack.enter_async_context(run_in_background(suspensions.run())))
        parts.append(await stack.enter_async_context(run_in_background(_keep_serving(settings, folder))))
        stack.push_async_callback(owner.leave)
        end_if_canceled()  # a step above may have lost it
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()


def make_agent(
    settings: Settings, registry: Registry, releases: Releases, packer: DataPacker | None, suspensions: Suspensions
) -> tuple[HostAgent, Serving, Owner]:
    """Makes what follows the records, what serves them, and what knows which start commands run here.

    Without a `packer`, this host runs no apps.
    """
    find_address, host = partial(find_app, registry), releases.folder_id()
    owner: Owner = AlwaysOwner()
    if settings.storage_url:
        owner = Ownership(
            settings,
            registry.store,
            open_storage(settings),
            releases,
            Deploys(settings, registry),
            packer,
            registry.find_app,
            lambda app_id: agent.repeat_step(app_id),
            lambda: agent.is_ready(),
        )
    serving = Serving(settings, find_address, owner, suspensions.mark)
    records = Records(registry.store, "" if settings.storage_url else host)
    agent = HostAgent(records, host, serving, find_address, settings.canary)
    return agent, serving, owner


async def _keep_serving(settings: Settings, folder: Path) -> NoReturn:
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


def _open_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def listen(settings: Settings) -> socket.socket:
    """Waits until the port is free, and listens there. In development, listens at another port instead.

    `[::]` stands for all addresses of both families, or of IPv4 alone on a machine without IPv6.
    """
    host, _, wanted = settings.apps_listen.rpartition(":")
    host = host.strip("[]")
    both = host == "::" and socket.has_dualstack_ipv6()
    if host == "::" and not both:
        host = "0.0.0.0"  # noqa: S104
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    choices = [int(wanted), *([0] if settings.allow_private_addresses else [])]
    waiting = False
    reason = ""
    while True:
        for choice in choices:
            try:
                return socket.create_server((host, choice), family=family, backlog=BACKLOG, dualstack_ipv6=both)
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
        task = asyncio.create_task(self._report(app_id, crash, lines, event_id))
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _report(self, app_id: str, crash: AppCrashed, lines: list[str], known_id: str) -> None:
        event_id = known_id or new_id("evt")
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                while True:
                    try:
                        app = await self.registry.find_app(app_id)
                        if app is not None and not (known_id and await self._crashes.has(app, known_id)):
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
