"""Keeps apps with a start command running: exactly those with a link in the folder `running`.

An app that ends is restarted after a growing pause. If it was served live, the watchdog reports a crash. The app gets
a port, its release to read, and a scratch folder that lasts until it ends. When a watchdog is killed, its apps are
killed too, and the next watchdog starts them again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from gateway.accounts.vault import Vault
from gateway.cancellation import finish_despite_cancellation
from workers.sandbox.sandbox import KEEPER_MODULE, MIB, Command, Limits, Outcome, Sandbox
from workers.sites.environment import concealer, read_environment
from workers.sites.output import Output, remove_output
from workers.sites.releases import Releases, Site, remove_folder
from workers.sites.web import AppState, state_path

logger = structlog.get_logger()

ReportCrash = Callable[[str, Literal["exit", "oom"], int | None], Awaitable[None]]  # app id, reason, exit code

CHECK_INTERVAL = 0.2  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
FORMER_CHECKS = 50  # for keepers of a killed watchdog
STABLE_SECONDS = 60.0  # of running, after which the pause starts small again
# Apps may connect to https, mail servers and common databases, but not to Redis or port 80.
PORTS = [443, 465, 587, 3306, 5432, 27017]
LIMITS = Limits(memory=512 * MIB, disk=1_024 * MIB, processes=512, nice=5, grace=10)


class Watchdog:
    def __init__(
        self,
        folder: Path,
        sandbox: Sandbox,
        report_crash: ReportCrash,
        limits: Limits = LIMITS,
        vault: Vault | None = None,  # opens the variables of releases
    ) -> None:
        self._vault = vault or Vault("")
        self._folder, self._releases = folder, Releases(folder)
        self._sandbox, self._report, self._limits = sandbox, report_crash, limits
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled, and then stops all apps."""
        await self._clean_up_former()
        try:
            while True:
                wanted = self._releases.releases_to_run()
                for deploy_id, task in self._running.items():
                    if deploy_id not in wanted and not task.cancelling():
                        task.cancel()
                for deploy_id in wanted.keys() - self._running.keys():
                    task = asyncio.create_task(self._keep_running(wanted[deploy_id]))
                    self._running[deploy_id] = task
                    task.add_done_callback(lambda _, ended=deploy_id: self._running.pop(ended))  # type: ignore[misc]
                await asyncio.sleep(CHECK_INTERVAL)
        finally:
            stopping = list(self._running.values())
            for task in stopping:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)

    async def _clean_up_former(self) -> None:
        """Waits for the keepers of a killed watchdog, which end shortly after it and kill their apps."""
        for _ in range(FORMER_CHECKS):
            if not _keeper_runs_below(self._releases.running):
                break
            await asyncio.sleep(CHECK_INTERVAL)
        _clear(self._releases.running)

    async def _keep_running(self, release: Path) -> None:
        state, pause = AppState(), FIRST_PAUSE
        try:
            while True:
                began = time.monotonic()
                try:
                    outcome = await self._run_once(release, state)
                except Exception as error:  # no user, process or disk space is left
                    logger.error("app.not_started", deploy=release.name, exc_info=error)
                    outcome = Outcome(126)
                state = AppState(0, state.exits + 1, outcome.describe("the start command", self._limits))
                with suppress(OSError):
                    self._write_state(release, state)
                await self._report_crash(release, outcome)
                if time.monotonic() - began > STABLE_SECONDS:
                    pause = FIRST_PAUSE
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            state_path(self._folder, release.name).unlink(missing_ok=True)
            remove_output(output_path(self._folder, release.name))

    async def _run_once(self, release: Path, state: AppState) -> Outcome:
        scratch = self._folder / "running" / f"{release.name}.scratch"
        with self._sandbox.reserve_user() as uid:
            await asyncio.to_thread(remove_folder, scratch)
            scratch.mkdir(mode=0o700)
            try:
                self._sandbox.give_to_user(scratch, uid)
                if uid is not None:  # users of other apps could guess the path
                    os.chown(release / "app", os.geteuid(), uid)
                    (release / "app").chmod(0o750)
                return await self._run(release, uid, scratch, state)
            finally:
                await finish_despite_cancellation(asyncio.to_thread(remove_folder, scratch))

    async def _run(self, release: Path, uid: int | None, scratch: Path, state: AppState) -> Outcome:
        port = free_port()
        variables = read_environment(release, self._vault)
        command = self._command(release, port, scratch, variables)
        with Output(output_path(self._folder, release.name), concealer(variables)) as output:
            async with self._sandbox.start(command, uid, output.write_line) as ending:
                self._write_state(release, AppState(port, state.exits, state.last))
                return await asyncio.shield(ending)

    def _command(self, release: Path, port: int, scratch: Path, variables: Mapping[str, str]) -> Command:
        return Command(
            # The shell survives SIGTERM and its children don't. If the shell ended first, they would be killed at once.
            arguments=["sh", "-c", f"trap : TERM\n{(release / 'start').read_text()}"],
            folder=release / "app",
            environment={
                **self._sandbox.environment,
                "NODE_ENV": "production",
                **variables,
                "PORT": str(port),
                "HOST": "127.0.0.1",
                "HOME": str(scratch),
                "TMPDIR": str(scratch),
            },
            read=[release / "app"],
            write=[scratch],
            bind=[port],
            connect=[port, *PORTS],
            limits=self._limits,
        )

    def _write_state(self, release: Path, state: AppState) -> None:
        path = state_path(self._folder, release.name)
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(state))
        fresh.replace(path)

    async def _report_crash(self, release: Path, outcome: Outcome) -> None:
        site = Site(release.parent)
        logger.warning("app.ended", app=site.app_id, deploy=release.name, code=outcome.code, why=outcome.why)
        # While a release is being checked, its end fails the deploy instead. Previews are not reported.
        if site.variant == "live" and site.current == release.name:
            reason: Literal["exit", "oom"] = "oom" if outcome.why == "memory" else "exit"
            try:
                await self._report(site.app_id, reason, outcome.code if outcome.code >= 0 else 128 - outcome.code)
            except Exception as error:  # the app is restarted in any case
                logger.error("app.crash_not_told", app=site.app_id, exc_info=error)


def output_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.output"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _keeper_runs_below(folder: Path) -> bool:
    """True while any keeper runs a command in the folder."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            if KEEPER_MODULE.encode() in command and os.fsencode(folder) in command:
                return True
    return False


def _clear(folder: Path) -> None:
    """Removes everything but the links, which say what to run."""
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            remove_folder(left)
        elif not left.is_symlink() or left.name.startswith("."):
            left.unlink()
