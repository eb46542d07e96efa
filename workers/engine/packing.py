"""Packs the data of apps into archives, and unpacks them (`data.py` stores them).

A process in the sandbox packs them, as the app's user, while the app runs (`workers/sandbox/pack.py`). What that
process writes is as little trusted as the app: it is unpacked in the sandbox too.
"""

import os
import stat
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import structlog

from gateway.cancellation import run_in_thread
from gateway.storage import check_exit_code
from workers.engine.app_data import AppData
from workers.sandbox.keeper import measure_data, measure_disk
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import ARCHIVES, MIB, PACK, Command, Sandbox, SandboxLimits

logger = structlog.get_logger()

PACK_SECONDS, UNPACK_SECONDS = 1_800.0, 1_800.0
FIRST_PACK_SECONDS, PACK_BYTES_PER_SECOND = 120.0, 10 * MIB  # before that for smaller plans, because others may wait
MOST_FILES = 20_000_000  # of one app; the bytes bound them first
MAX_NOTES = 20
NOTE_LENGTH = 300
NOT_STOPPED = "The app did not stop in time; try again."


class DataError(Exception):
    """A reason why a command fails. Account holders see the message.

    `service_fault`: the service has failed, not the app, so the same command may succeed later.
    """

    def __init__(self, message: str, *, service_fault: bool = False) -> None:
        super().__init__(message)
        self.service_fault = service_fault


class SandboxPacker:
    """Packs and unpacks in the sandbox. `scratch`: where archives are made; by default, beside the data."""

    def __init__(self, sandbox: Sandbox, scratch: Path | None = None) -> None:
        self._sandbox, self._scratch = sandbox, scratch

    # -- archives --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def packed(self, data: AppData, files: Path) -> AsyncIterator[tuple[Path, list[str]]]:
        """Packs the files. Yields the archive, and what it lacks. Raises DataError, and OSError for a full disk."""
        packed = (self._scratch or data.folder) / "packed.tar.gz"
        try:
            yield packed, await self._pack(data, files, packed)
        finally:
            packed.unlink(missing_ok=True)

    async def _pack(self, data: AppData, files: Path, packed: Path) -> list[str]:
        work = (self._scratch or data.folder) / "work"
        taken = await run_in_thread(measure_disk, files)  # may be more than the plan allows; holes would fill the disk
        most = 2 * max(data.limit or 0, taken, MIB)
        seconds = min(FIRST_PACK_SECONDS + most / PACK_BYTES_PER_SECOND, PACK_SECONDS)
        limits = SandboxLimits(seconds=seconds, memory=512 * MIB, disk=4 * most, inodes=MOST_FILES)
        notes: list[str] = []  # the first ones, and the last one

        def add_note(line: str) -> None:
            del notes[MAX_NOTES:]
            notes.append(line[:NOTE_LENGTH])

        with ExitStack() as stack:
            uid = await run_in_thread(stack.enter_context, data.user(self._sandbox, files))
            await run_in_thread(remove_folder, work)
            work.mkdir(mode=0o700)
            self._sandbox.give_to_user(work, uid)
            command = Command(
                program=PACK,
                arguments=[*map(str, (files, work / "packed", work / "copy", most))],
                folder=work,
                environment=self._sandbox.environment,
                write=[work, files],
                limits=limits,
            )
            try:
                outcome = await self._sandbox.run(command, uid, add_note)
                check_exit_code(outcome.code)
                if not outcome.ok:
                    reason = outcome.describe("packing the data", limits)
                    logger.error("data.not_packed", app=data.app_id, reason=reason, last=notes[-1:])
                    raise DataError(f"No snapshot was made: {reason}.", service_fault=outcome.is_service_fault)
                _take_file(work / "packed", packed)
            finally:
                await run_in_thread(remove_folder, work)
        if notes:
            logger.warning("data.left_out", app=data.app_id)
        return notes[:MAX_NOTES]

    @asynccontextmanager
    async def unpacked(self, data: AppData, archive: Path, limit: int) -> AsyncIterator[Path]:
        """Unpacks an archive with at most so many bytes. Yields a folder beside the data.

        Raises DataError, and OSError for a full disk.
        """
        incoming = data.folder / "incoming"
        try:
            await self._unpack(data, archive, incoming, limit)
            yield incoming
        finally:
            await run_in_thread(remove_folder, incoming)

    async def _unpack(self, data: AppData, archive: Path, incoming: Path, limit: int) -> None:
        await run_in_thread(remove_folder, incoming)
        await run_in_thread(incoming.mkdir, mode=0o700)
        limits = SandboxLimits(seconds=UNPACK_SECONDS, memory=512 * MIB, disk=2 * limit + MIB, inodes=MOST_FILES)
        last = deque([""], maxlen=1)
        with ExitStack() as stack:
            uid = await run_in_thread(stack.enter_context, data.user(self._sandbox))
            self._sandbox.give_to_user(incoming, uid)
            command = Command(
                program=ARCHIVES,
                arguments=["unpack", str(MOST_FILES), str(limit)],
                folder=incoming,
                environment=self._sandbox.environment,
                write=[incoming],
                limits=limits,
            )
            with archive.open("rb") as stdin:
                outcome = await self._sandbox.run(command, uid, last.append, stdin=stdin)
        check_exit_code(outcome.code)
        if not outcome.ok:
            reason = last[0] if last[0] and not outcome.why else outcome.describe("unpacking it", limits)
            raise DataError(f"the snapshot can't be restored: {reason}", service_fault=outcome.is_service_fault)
        if await run_in_thread(measure_data, incoming) > limit:
            raise DataError(f"the snapshot can't be restored: it has more than the plan's {limit // MIB} MiB")


def _take_file(path: Path, target: Path) -> None:
    """Moves a file that a process in the sandbox has written. Raises DataError for anything else."""
    path.rename(target)
    status = target.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise DataError("No snapshot was made.")
    if os.geteuid() == 0:
        os.chown(target, 0, 0, follow_symlinks=False)
    target.chmod(0o600)
