"""Keeps the apps running that have a start command and a link in the folder `running`.

An app that ends is restarted after a growing pause. If it was served live, the watchdog reports a crash. Each app has a
port in its own network, which a Unix socket leads to. It can read its release, and has a scratch folder until it ends.

Apps outlive the watchdog. A keeper runs each app until the app's link is removed, and the file `<deploy id>.state`
names the keeper. The next watchdog adopts the keepers that it finds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from gateway.accounts.vault import Vault
from gateway.cancellation import finish_despite_cancellation
from gateway.deploys.runtime_log import RuntimeLog
from gateway.monitors.crashes import MAX_LINES
from workers.hosting.environment import read_environment
from workers.hosting.processes import is_running, start_time
from workers.hosting.releases import Releases, Site, remove_folder
from workers.sandbox.sandbox import MIB, Command, Detached, Outcome, Sandbox, SandboxLimits, read_outcome

logger = structlog.get_logger()

# App id, reason, exit code, the last lines of its output.
ReportCrash = Callable[[str, Literal["exit", "oom"], int | None, list[str]], Awaitable[None]]

CHECK_SECONDS = 0.2  # between checks of links and keepers
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0  # before a restart
STABLE_SECONDS = 60.0  # of running, after which the pause is short again
# Apps may connect to https, mail servers and common databases at public addresses.
PORTS = [443, 465, 587, 3306, 5432, 27017]
PORT = 8080  # where an app listens; each app has its own network
LIMITS = SandboxLimits(memory=512 * MIB, disk=1_024 * MIB, inodes=100_000, processes=512, cpus=1, nice=5, grace=10)


class AppState(msgspec.Struct, frozen=True):
    """The state of a start command. The watchdog writes it beside the link in `running`."""

    socket: str = ""  # of Unix, where the app is reached; empty while it does not run
    exits: int = 0
    last: str = ""  # how it ended last
    keeper: int = 0  # the process id of its keeper, and when that started
    began: int = 0


def state_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.state"


def read_state(folder: Path, deploy_id: str) -> AppState:
    try:
        return msgspec.json.decode(state_path(folder, deploy_id).read_bytes(), type=AppState)
    except FileNotFoundError:
        return AppState()


class Watchdog:
    def __init__(
        self,
        folder: Path,
        sandbox: Sandbox,
        report_crash: ReportCrash,
        limits: SandboxLimits = LIMITS,
        vault: Vault | None = None,  # decrypts the variables of releases
    ) -> None:
        self._vault = vault or Vault("")
        self._folder, self._releases, self._output = folder, Releases(folder), RuntimeLog(str(folder))
        self._sandbox, self._report, self._limits = sandbox, report_crash, limits
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until canceled. The apps keep running."""
        await asyncio.to_thread(self._remove_leftovers)
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
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            stopping = list(self._running.values())
            for task in stopping:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)

    async def _keep_running(self, release: Path) -> None:
        state, pause = read_state(self._folder, release.name), FIRST_PAUSE_SECONDS
        try:
            while True:
                began = time.monotonic()
                outcome = await self._run_once(release, state)
                if outcome is None:  # its link was gone for a moment, because the release was stopped and served again
                    state = AppState(exits=state.exits, last=state.last)
                    continue
                state = AppState("", state.exits + 1, outcome.describe("the start command", self._limits))
                with suppress(OSError):
                    self._write_state(release, state)
                await self._report_crash(release, outcome)
                if time.monotonic() - began > STABLE_SECONDS:
                    pause = FIRST_PAUSE_SECONDS
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        finally:
            if not (self._releases.running / release.name).is_symlink():
                await finish_despite_cancellation(self._clean_up(release))

    async def _run_once(self, release: Path, state: AppState) -> Outcome | None:
        """Starts the app unless it runs already, and waits for its end. Returns None if it was stopped on purpose."""
        try:
            if state.keeper == 0:
                # In a thread, which ends even if this is canceled, because no unknown keeper must be left.
                state = await finish_despite_cancellation(asyncio.to_thread(self._start, release, state))
            await _until_ended(state)
            report = self._path(release, "ended").read_bytes()
        except Exception as error:  # no user, process or disk space is left
            logger.error("app.not_started", deploy=release.name, exc_info=error)
            return Outcome(126)
        outcome = read_outcome(report)
        return None if report and outcome.why == "stopped" else outcome

    def _start(self, release: Path, state: AppState) -> AppState:
        scratch, socket = self._path(release, "scratch"), self._path(release, "sock")
        remove_folder(scratch)
        scratch.mkdir(mode=0o700)
        variables = read_environment(release, self._vault)
        command = self._command(release, scratch, variables)
        detached = Detached(
            link=self._releases.running / release.name,
            socket=socket,
            port=PORT,
            output=output_path(self._folder, release.name),
            report=self._path(release, "ended"),
        )
        with self._sandbox.reserve_user() as uid:  # the keeper holds the reservation
            self._sandbox.give_to_user(scratch, uid)
            (release / "app").chmod(0o755)
            keeper = self._sandbox.detach(command, uid, detached)
        began = start_time(keeper) or 0
        state = AppState(str(socket), state.exits, state.last, keeper, began)
        self._write_state(release, state)
        return state

    async def _clean_up(self, release: Path) -> None:
        """Waits until the keeper has stopped the app, and removes the app's files."""
        await _until_ended(read_state(self._folder, release.name))
        await asyncio.to_thread(self._remove_files, release.name)

    def _remove_leftovers(self) -> None:
        """Removes the files of releases whose link is gone and whose keeper has ended."""
        wanted = self._releases.releases_to_run()
        names = {path.name.partition(".")[0] for path in self._releases.running.iterdir()}
        for name in names - wanted.keys():
            state = read_state(self._folder, name)
            if not is_running(state.keeper, state.began):
                self._remove_files(name)

    def _remove_files(self, deploy_id: str) -> None:
        remove_folder(self._releases.running / f"{deploy_id}.scratch")
        for path in self._releases.running.glob(f"{deploy_id}.*"):
            path.unlink(missing_ok=True)

    def _path(self, release: Path, kind: str) -> Path:
        return self._releases.running / f"{release.name}.{kind}"

    def _command(self, release: Path, scratch: Path, variables: Mapping[str, str]) -> Command:
        return Command(
            # The shell ignores SIGTERM, but its children do not. If the shell ended first, they would be killed at
            # once.
            arguments=["sh", "-c", f"trap : TERM\n{(release / 'start').read_text()}"],
            folder=release / "app",
            environment={
                **self._sandbox.environment,
                "NODE_ENV": "production",
                **variables,
                "PORT": str(PORT),
                "HOST": "127.0.0.1",
                "HOME": str(scratch),
                "TMPDIR": str(scratch),
            },
            read=[release / "app"],
            write=[scratch],
            connect=PORTS,
            limits=self._limits,
            secrets=variables,
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
            code = outcome.code if outcome.code >= 0 else 128 - outcome.code
            try:
                await self._report(site.app_id, reason, code, await self._output.tail(release.name, MAX_LINES))
            except Exception as error:  # the app is restarted anyway
                logger.error("app.crash_not_reported", app=site.app_id, exc_info=error)


def output_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.output"


async def _until_ended(state: AppState) -> None:
    """Waits until the keeper ends. Polls, because another process may have started it."""
    while is_running(state.keeper, state.began):  # noqa: ASYNC110
        await asyncio.sleep(CHECK_SECONDS)
