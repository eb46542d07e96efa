"""Keeps the apps that have a start command running: what stands in `running` runs, and nothing else.

An app that ends is started again, after a pause that grows; what is served to people and ends tells so (`crashed`).
It gets a port, its release to read, and a folder of its own to write to while it runs. A watchdog that is killed takes
its apps with it, and the next one starts them again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from gateway.cancellation import undisturbed
from workers.deploys.releases import Releases, Site, remove
from workers.sandbox.sandbox import KEEPER_MODULE, MIB, Command, Ended, Limits, Sandbox
from workers.sites.web import Running, running_path

logger = structlog.get_logger()

Crashed = Callable[[str, Literal["exit", "oom"], int | None], Awaitable[None]]  # app id, reason, exit code

LOOK = 0.2  # seconds between looks at what shall run
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
FORMER_LOOKS = 50
STEADY = 60.0  # seconds of running after which an exit counts as the first
OUTPUT_BYTES = 262_144
# Out to https, the mail servers' and the usual databases' ports; not to Redis, nor to port 80.
PORTS = [443, 465, 587, 3306, 5432, 27017]
LIMITS = Limits(memory=512 * MIB, disk=1_024 * MIB, processes=512, nice=5, grace=10)


class Watchdog:
    def __init__(self, folder: Path, sandbox: Sandbox, crashed: Crashed, limits: Limits = LIMITS) -> None:
        self._folder, self._releases = folder, Releases(folder)
        self._sandbox, self._crashed, self._limits = sandbox, crashed, limits
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled; then everything is stopped."""
        await self._forget_former()
        try:
            while True:
                wanted = self._releases.shall_run()
                for deploy_id, task in self._running.items():
                    if deploy_id not in wanted and not task.cancelling():
                        task.cancel()
                for deploy_id in wanted.keys() - self._running.keys():
                    task = asyncio.create_task(self._keep(wanted[deploy_id]))
                    self._running[deploy_id] = task
                    task.add_done_callback(lambda _, ended=deploy_id: self._running.pop(ended))  # type: ignore[misc]
                await asyncio.sleep(LOOK)
        finally:
            stopping = list(self._running.values())
            for task in stopping:
                task.cancel()
            await asyncio.gather(*stopping, return_exceptions=True)

    async def _forget_former(self) -> None:
        """The keepers of one that was killed end a moment later, and with them all that has their app's user."""
        for _ in range(FORMER_LOOKS):
            if not _kept_below(self._releases.running):
                break
            await asyncio.sleep(LOOK)
        _clear(self._releases.running)

    async def _keep(self, release: Path) -> None:
        state, pause = Running(), FIRST_PAUSE
        try:
            while True:
                began = time.monotonic()
                try:
                    ended = await self._once(release, state)
                except Exception as error:  # no user, process, or room on the disk is left
                    logger.error("app.not_started", deploy=release.name, exc_info=error)
                    ended = Ended(126)
                state = Running(0, state.exits + 1, ended.told("the start command", self._limits))
                with suppress(OSError):
                    self._write(release, state)
                await self._tell(release, ended)
                if time.monotonic() - began > STEADY:
                    pause = FIRST_PAUSE
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            running_path(self._folder, release.name).unlink(missing_ok=True)
            output_path(self._folder, release.name).unlink(missing_ok=True)

    async def _once(self, release: Path, state: Running) -> Ended:
        scratch = self._folder / "running" / f"{release.name}.scratch"
        with self._sandbox.user() as uid:
            await asyncio.to_thread(remove, scratch)
            scratch.mkdir(mode=0o700)
            try:
                self._sandbox.give(scratch, uid)
                if uid is not None:  # other apps' users know where it lies
                    os.chown(release / "app", os.geteuid(), uid)
                    (release / "app").chmod(0o750)
                return await self._run(release, uid, scratch, state)
            finally:
                await undisturbed(asyncio.to_thread(remove, scratch))

    async def _run(self, release: Path, uid: int | None, scratch: Path, state: Running) -> Ended:
        port = free_port()
        command = Command(
            # The shell is to outlive SIGTERM, and its children not: its end would be theirs, at once.
            arguments=["sh", "-c", f"trap : TERM\n{(release / 'start').read_text()}"],
            folder=release / "app",
            environment={
                **self._sandbox.environment,
                "PORT": str(port),
                "HOST": "127.0.0.1",
                "NODE_ENV": "production",
                "HOME": str(scratch),
                "TMPDIR": str(scratch),
            },
            read=[release / "app"],
            write=[scratch],
            bind=[port],
            connect=[port, *PORTS],
            limits=self._limits,
        )
        path, left = output_path(self._folder, release.name), OUTPUT_BYTES
        mode = "ab" if path.exists() and path.stat().st_size < OUTPUT_BYTES else "wb"
        path.touch(mode=0o600)
        with path.open(mode) as output:

            def tell(line: str) -> None:
                nonlocal left
                if left > 0:
                    left -= output.write(line.encode() + b"\n")
                    output.flush()

            async with self._sandbox.started(command, uid, tell) as ending:
                self._write(release, Running(port, state.exits, state.last))
                return await asyncio.shield(ending)

    def _write(self, release: Path, state: Running) -> None:
        path = running_path(self._folder, release.name)
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(state))
        fresh.replace(path)

    async def _tell(self, release: Path, ended: Ended) -> None:
        site = Site(release.parent)
        logger.warning("app.ended", app=site.app_id, deploy=release.name, code=ended.code, why=ended.why)
        # What is being checked fails its deploy instead, and a preview is nobody's outage.
        if site.variant == "live" and site.current == release.name:
            reason: Literal["exit", "oom"] = "oom" if ended.why == "memory" else "exit"
            try:
                await self._crashed(site.app_id, reason, ended.code if ended.code >= 0 else 128 - ended.code)
            except Exception as error:  # the app is started again all the same
                logger.error("app.crash_not_told", app=site.app_id, exc_info=error)


def output_path(folder: Path, deploy_id: str) -> Path:
    return folder / "running" / f"{deploy_id}.output"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kept_below(folder: Path) -> bool:
    """Whether a keeper works there, whoever started it."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            if KEEPER_MODULE.encode() in words and os.fsencode(folder) in words:
                return True
    return False


def _clear(folder: Path) -> None:
    """Of all but the links, which say what shall run."""
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            remove(left)
        elif not left.is_symlink() or left.name.startswith("."):
            left.unlink()
