"""Keeps the apps running that have a start command and a link in the folder `running`.

An app that ends is restarted after a growing pause. If it was served live, the watchdog reports a crash. Each app has a
port in its own network, which a Unix socket leads to. It can read its release, and has a scratch folder until it ends.
A live release also has the app's data (`data.py`), and a preview an empty folder in its scratch folder instead. Each
app sees these folders at the same paths as its build (`sandbox.py`).

The app of a suspended site (`suspensions.py`) is ended, and starts again when that is lifted.

An app that is idle for as long as its plan allows sleeps: its processes end, and the watchdog keeps its socket
(`sleep.py`). The next connection starts the app again. That is neither a crash nor a restart.

Apps outlive the watchdog. A keeper runs each app until the app's link is removed, and the file `<deploy id>.state`
names the keeper. The next watchdog adopts the keepers that it finds.
"""

import asyncio
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import structlog

from gateway.accounts.vault import Vault
from gateway.cancellation import RunningTasks, end_if_canceled, finish_despite_cancellation, run_in_background
from gateway.deploys.recognition import SourceFolder
from gateway.deploys.runtime_log import RuntimeLog
from gateway.loops import every, pauses
from workers.engine.app_data import AppData, DataHeld
from workers.hosting.release_files import read_environment, read_url
from workers.hosting.releases import Releases, Site
from workers.hosting.sleep import Idle, ask_relay, until_readable
from workers.sandbox.keeper import listen_for_visitors
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import (
    APP,
    DATA,
    DATA_FULL,
    HOME,
    MIB,
    TMP,
    Command,
    Detached,
    Outcome,
    Sandbox,
    SandboxLimits,
    read_outcome,
)
from workers.sandbox.versions import choose_versions


def start_time(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since boot; None if it has ended.

    It distinguishes the process from a later process with the same id.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else int(fields[19])
    if sys.platform != "linux":
        with suppress(OSError):
            os.kill(pid, 0)
            return 0
    return None


@functools.cache
def identify_boot() -> str:
    """Returns a name that changes when the machine or the container restarts, which ends all processes."""
    boot = "/proc/sys/kernel/random/boot_id"
    return f"{Path(boot).read_text().strip()} {start_time(1)}" if Path(boot).exists() else ""


def is_running(pid: int, began: int) -> bool:
    return pid != 0 and start_time(pid) == began


logger = structlog.get_logger()

# App id, reason, exit code, the last lines of its output.
ReportCrash = Callable[[str, Literal["exit", "oom"], int | None, list[str]], Awaitable[None]]


class FindSleepLimit(Protocol):
    """Returns the seconds without a request after which an app sleeps. None: it stays awake, for now."""

    async def __call__(self, app_id: str, *, is_preview: bool) -> float | None: ...


CHECK_SECONDS = 0.2  # between checks of links and keepers
SUSPENDED_GRACE_SECONDS = 0.5  # between the signals that end and kill an app that was suspended
LINKS_SECONDS = 5.0  # between reads of all links, even if the folder has not changed
IDLE_CHECK_SECONDS = 60.0  # at most, between checks whether an app may sleep
SHORTEST_IDLE_CHECK_SECONDS = 0.1
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0  # before a restart
STABLE_SECONDS = 60.0  # of running, after which the pause is short again
# Apps may connect to https, mail servers and common databases at public addresses.
PORTS = [443, 465, 587, 3306, 5432, 27017]
SCRATCH = {"home": HOME, "tmp": TMP}  # the folders in the scratch folder; `data` too for a preview
DATA_LIMIT = 256 * MIB  # until the account's plan is known
PORT = 8080  # where an app listens; each app has its own network
LIMITS = SandboxLimits(memory=512 * MIB, disk=1_024 * MIB, inodes=100_000, processes=512, cpus=1, nice=5, grace=10)


class AppState(msgspec.Struct, frozen=True):
    """The state of a start command. The watchdog writes it beside the link in `running`."""

    socket: str = ""  # of Unix, where the app is reached; empty while it does not run and does not sleep
    exits: int = 0
    last: str = ""  # how it ended last
    keeper: int = 0  # the process id of its keeper, and when that started
    began: int = 0
    boot: str = ""  # during which the keeper started
    asleep: bool = False  # nothing of it runs, and the next request starts it


def state_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.state"


def read_state(folder: Path, deploy_id: str) -> AppState:
    try:
        state = msgspec.json.decode(state_path(folder, deploy_id).read_bytes(), type=AppState)
    except FileNotFoundError:
        return AppState()
    if state.boot not in ("", identify_boot()):  # the restart ended the app, which has not crashed
        return AppState(exits=state.exits, last=state.last)
    return state


def make_command(
    start: str, app: Path, sandbox: Sandbox, variables: Mapping[str, str], limits: SandboxLimits = LIMITS
) -> Command:
    """Returns the command that runs an app. `app`: the folder with the release's files."""
    return Command(
        # The shell ignores SIGTERM, but its children do not. If the shell ended first, they would be killed at once.
        arguments=["sh", "-c", f"trap : TERM\n{start}"],
        folder=Path(APP),
        environment={
            **sandbox.prepend_path(choose_versions(SourceFolder(app), sandbox.tools).folders),
            "NODE_ENV": "production",
            **variables,
            "PORT": str(PORT),
            "HOST": "127.0.0.1",
            "HOME": HOME,
            "TMPDIR": TMP,
            "DATA_DIR": DATA,
        },
        read=[app],
        connect=PORTS,
        limits=limits,
        secrets=variables,
    )


class Watchdog:
    def __init__(
        self,
        folder: Path,
        sandbox: Sandbox,
        report_crash: ReportCrash,
        limits: SandboxLimits = LIMITS,
        vault: Vault | None = None,  # decrypts the variables of releases
        find_sleep_limit: FindSleepLimit | None = None,  # by default, no app sleeps
        first_data_limit: int = DATA_LIMIT,
    ) -> None:
        self._vault, self._first_data_limit = vault or Vault(""), first_data_limit
        self._folder, self._releases, self._output = folder, Releases(folder), RuntimeLog(str(folder))
        self._sandbox, self._report, self._limits = sandbox, report_crash, limits
        self._running = RunningTasks()  # by deploy
        self._wanted: dict[str, Path] = {}
        self._changed = self._read_at = 0.0  # the time of the folder's last change, and of the last read of the links
        self._find_sleep_limit = find_sleep_limit or stay_awake
        self._listeners: dict[str, socket.socket] = {}  # of apps that sleep or go to sleep, by deploy id

    async def run(self) -> None:
        """Runs until canceled. The apps keep running."""
        await asyncio.to_thread(self._remove_leftovers)
        try:
            await every(CHECK_SECONDS, self._follow_links)
        finally:
            await self._running.cancel()

    async def _follow_links(self) -> None:
        wanted = self._find_releases()
        for deploy_id, task in self._running.items():
            if deploy_id not in wanted and not task.cancelling():
                task.cancel()
        for deploy_id in wanted.keys() - self._running.keys():
            self._running.start(self._keep_running(wanted[deploy_id]), deploy_id)

    def _find_releases(self) -> dict[str, Path]:
        """Returns the releases to run. Reads their links only if the folder has changed, because there may be many."""
        changed, now = self._releases.running.stat().st_mtime, time.time()
        # Two changes within a tick of the kernel's clock have the same time.
        if changed != self._changed or now - changed < 1 or abs(now - self._read_at) > LINKS_SECONDS:
            self._wanted, self._changed, self._read_at = self._releases.releases_to_run(), changed, now
            self._releases.confirm_stops({*self._wanted, *map(str, self._running)})
        return self._wanted

    async def _keep_running(self, release: Path) -> None:
        state, growing = read_state(self._folder, release.name), pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        try:
            while True:
                if state.asleep:
                    await self._until_visited(release)
                    state = AppState(exits=state.exits, last=state.last)
                began = time.monotonic()
                outcome = await self._run_once(release, state)
                if outcome is None and release.name in self._listeners:
                    socket_path = self._path(release, "sock")
                    state = AppState(str(socket_path), state.exits, state.last, asleep=True)
                    with suppress(OSError):
                        self._write_state(release, state)
                    continue
                if outcome is None:  # its link was gone for a moment, because the release was stopped and served again
                    state = AppState(exits=state.exits, last=state.last)
                    continue
                self._close_listener(release)
                state = AppState("", state.exits + 1, outcome.describe("the start command", self._limits))
                with suppress(OSError):
                    self._write_state(release, state)
                await self._report_crash(release, outcome)
                if time.monotonic() - began > STABLE_SECONDS:
                    growing = pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
                data = self._find_data(release)
                if data is None or not data.is_full:  # an app whose data are full does not start yet anyway
                    await asyncio.sleep(next(growing))
        finally:
            self._close_listener(release)
            if not (self._releases.running / release.name).is_symlink():
                await finish_despite_cancellation(self._clean_up(release))

    async def _run_once(self, release: Path, state: AppState) -> Outcome | None:
        """Starts the app unless it runs already, and waits for its end. Returns None if it was stopped on purpose."""
        site = Site(release.parent)
        try:
            if state.keeper == 0:
                await self._until_data_are_ready(release, state)
                while not self._may_run(release):  # noqa: ASYNC110
                    await asyncio.sleep(CHECK_SECONDS)
                # In a thread, which ends even if this is canceled, because no unknown keeper must be left.
                state = await finish_despite_cancellation(asyncio.to_thread(self._start, release, state))
            await self._until_ended_or_asleep(release, state)
            if site.is_suspended and release.name not in self._listeners:
                with suppress(OSError):
                    self._write_state(release, AppState(exits=state.exits, last=state.last))
                return None
            report = self._path(release, "ended").read_bytes()
        except DataHeld:
            return None
        except Exception as error:  # no user, process or disk space is left
            if (self._releases.running / release.name).is_symlink():  # otherwise it was just removed
                logger.error("app.not_started", deploy=release.name, exc_info=error)
            return Outcome(126)
        outcome = read_outcome(report)
        return None if report and outcome.why == "stopped" else outcome

    async def _until_ended_or_asleep(self, release: Path, state: AppState) -> None:
        async with (
            run_in_background(self._sleep_when_idle(release, state)),
            run_in_background(_stop_when_suspended(Site(release.parent), state)),
        ):
            await _until_ended(state)

    async def _sleep_when_idle(self, release: Path, state: AppState) -> None:
        """Stops the app once it is idle, and keeps its listener."""
        site, control = Site(release.parent), control_path(self._folder, release.name)
        while True:
            pause = IDLE_CHECK_SECONDS
            if (limit := await self._find_sleep_limit(site.app_id, is_preview=site.is_preview)) is not None:
                pause = min(limit, pause)
                with suppress(OSError, ValueError):  # the app is just starting or ending
                    answer = await ask_relay(control, limit)
                    if isinstance(answer, Idle):
                        break
                    pause = min(answer, pause)
            end_if_canceled()
            await asyncio.sleep(max(pause, SHORTEST_IDLE_CHECK_SECONDS))
        with answer.relay:
            self._listeners[release.name] = answer.listener
            with suppress(OSError):
                self._path(release, "asleep").touch()
            with suppress(ProcessLookupError):
                os.kill(state.keeper, signal.SIGTERM)
            await _until_ended(state)

    async def _until_visited(self, release: Path) -> None:
        """Waits for a connection to an app that sleeps."""
        try:
            if release.name not in self._listeners:  # a former watchdog had its listener
                self._listeners[release.name] = listen_for_visitors(str(self._path(release, "sock")))
            await until_readable(self._listeners[release.name])
        except OSError as error:  # no descriptor or disk space is left
            logger.error("app.not_asleep", deploy=release.name, error=error.strerror, action="the app is started")

    def _close_listener(self, release: Path) -> None:
        if (listener := self._listeners.pop(release.name, None)) is not None:
            listener.close()

    def _may_run(self, release: Path) -> bool:
        """Returns whether the release has its link, and is not suspended."""
        return not Site(release.parent).is_suspended and (self._releases.running / release.name).is_symlink()

    def _find_data(self, release: Path) -> AppData | None:
        """Returns the data that the release works with; None for a preview, which has only a scratch folder."""
        site = Site(release.parent)
        return None if site.is_preview else AppData(self._folder, site.app_id)

    async def _until_data_are_ready(self, release: Path, state: AppState) -> None:
        """Waits while the app's data are replaced, or are larger than they may be."""
        data, site = self._find_data(release), Site(release.parent)
        if data is None or not (data.is_held or data.is_full):
            return
        full = AppState("", state.exits or 1, f"it was not started: {DATA_FULL}")
        has_marked = False  # a mark that another release has made stays
        try:
            while data.is_held or data.is_full:
                with suppress(OSError):  # no disk space is left, either
                    if site.current == release.name:
                        site.mark_stopped()
                        has_marked = True
                    if data.is_full and not data.is_held and state != full:
                        self._close_listener(release)
                        self._write_state(release, state := full)
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            if has_marked:
                site.unmark_stopped()

    def _start(self, release: Path, state: AppState) -> AppState:
        scratch, listener = self._path(release, "scratch"), self._listeners.get(release.name)
        remove_folder(scratch)
        scratch.mkdir(mode=0o711)
        data = self._find_data(release)
        folders = {scratch / name: place for name, place in SCRATCH.items()}
        folders |= {scratch / "data": DATA} if data is None else {}
        for folder in folders:
            folder.mkdir(mode=0o700)
        variables = read_environment(release, self._vault)
        places = {release / "app": APP, **folders, **({data.files: DATA} if data is not None else {})}
        start, given = (release / "start").read_text(), variables | read_url(release)
        command = make_command(start, release / "app", self._sandbox, given, self._limits)
        command = msgspec.structs.replace(command, places=places, write=[*folders], secrets=variables)
        detached = Detached(
            link=self._releases.running / release.name,
            socket=self._path(release, "sock"),
            listener=None if listener is None else listener.fileno(),
            control=control_path(self._folder, release.name),
            port=PORT,
            output=output_path(self._folder, release.name),
            report=self._path(release, "ended"),
        )
        with self._prepare_data(release, command) as (uid, command):  # the keeper holds the reservation
            for folder in folders:
                self._sandbox.give_to_user(folder, uid)
            (release / "app").chmod(0o755)
            keeper = self._sandbox.detach(command, uid, detached)
        began = start_time(keeper) or 0
        state = AppState(str(detached.socket), state.exits, state.last, keeper, began, identify_boot())
        self._write_state(release, state)
        self._close_listener(release)  # the keeper has it
        return state

    @contextmanager
    def _prepare_data(self, release: Path, command: Command) -> Iterator[tuple[int | None, Command]]:
        """Yields the app's user, and the command with the app's data. Raises DataHeld, and OSError."""
        data = self._find_data(release)
        if data is None:
            with self._sandbox.reserve_user() as uid:
                yield uid, command
        else:
            account = Site(release.parent).account
            with data.running(account, self._first_data_limit) as lock, data.user(self._sandbox) as uid:
                if not self._may_run(release):
                    raise DataHeld
                yield uid, msgspec.structs.replace(command, data=data.folder, locks=[lock])

    async def _clean_up(self, release: Path) -> None:
        """Waits until the keeper has stopped the app, and removes its files. Leaves them if the link comes back."""
        state = read_state(self._folder, release.name)
        while is_running(state.keeper, state.began):
            await asyncio.sleep(CHECK_SECONDS)
            if (self._releases.running / release.name).is_symlink():
                return  # the keeper may not have noticed, so the app is watched again
        await asyncio.to_thread(self._remove_files, release.name)

    def _remove_leftovers(self) -> None:
        """Removes the files of releases whose link is gone and whose keeper has ended."""
        wanted = self._releases.releases_to_run()
        names = {path.name.partition(".")[0] for path in self._releases.running.iterdir()}
        for name in names - wanted.keys() - {""}:  # without those that are about to become links
            state = read_state(self._folder, name)
            if not is_running(state.keeper, state.began):
                self._remove_files(name)

    def _remove_files(self, deploy_id: str) -> None:
        remove_folder(self._releases.running / f"{deploy_id}.scratch")
        for path in self._releases.running.glob(f"{deploy_id}.*"):
            path.unlink(missing_ok=True)

    def _path(self, release: Path, kind: str) -> Path:
        return self._releases.running / f"{release.name}.{kind}"

    def _write_state(self, release: Path, state: AppState) -> None:
        if state.asleep:
            self._path(release, "asleep").touch()
        else:
            self._path(release, "asleep").unlink(missing_ok=True)
        path = state_path(self._folder, release.name)
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(state))
        fresh.replace(path)

    async def _report_crash(self, release: Path, outcome: Outcome) -> None:
        site = Site(release.parent)
        from gateway.monitors.crashes import MAX_LINES  # here, because each pod imports this module

        logger.warning("app.ended", app=site.app_id, deploy=release.name, code=outcome.code, why=outcome.why)
        # While a release is being checked, its end fails the deploy instead. Previews are not reported.
        if site.variant == "live" and site.current == release.name:
            reason: Literal["exit", "oom"] = "oom" if outcome.why == "memory" else "exit"
            code = outcome.code if outcome.code >= 0 else 128 - outcome.code
            try:
                await self._report(site.app_id, reason, code, await self._output.tail(release.name, MAX_LINES))
            except Exception as error:  # the app is restarted anyway
                logger.error("app.crash_not_reported", app=site.app_id, exc_info=error)


async def stay_awake(app_id: str, *, is_preview: bool) -> None:
    """Finds no limit for any app."""


def output_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.output"


def control_path(folder: Path, deploy_id: str) -> Path:
    """Returns the socket at which the relay of an app answers."""
    return folder / "running" / f"{deploy_id}.control"


async def _until_ended(state: AppState) -> None:
    """Waits until the keeper ends. Polls, because another process may have started it."""
    while is_running(state.keeper, state.began):  # noqa: ASYNC110
        await asyncio.sleep(CHECK_SECONDS)


async def _stop_when_suspended(site: Site, state: AppState) -> None:
    """Ends the app once its site is suspended. The watchdog starts it again when that is lifted."""
    while not site.is_suspended:  # noqa: ASYNC110
        await asyncio.sleep(CHECK_SECONDS)
    logger.info("app.suspended", app=site.app_id)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if is_running(state.keeper, state.began):
            with suppress(ProcessLookupError):
                os.kill(state.keeper, number)  # if a keeper is killed, the kernel kills its command
        await asyncio.sleep(SUSPENDED_GRACE_SECONDS)


async def stop_apps(folder: Path) -> None:
    """Stops all apps of a data folder without a watchdog, for which the keepers keep their apps running.

    The links stay, so the next watchdog starts the apps again.
    """
    states = [read_state(folder, path.stem) for path in (folder / "running").glob("*.state")]
    for state in states:
        if is_running(state.keeper, state.began):
            with suppress(ProcessLookupError):
                os.kill(state.keeper, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMITS.grace + CHECK_SECONDS):
            await asyncio.gather(*map(_until_ended, states))
