"""Carries out account holders' commands to the data of apps, wherever the data are: on this host or in a cluster.

Every command can be repeated, because it stays queued until it has an answer (`gateway/data/commands.py`).
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.data.commands import DataAnswer, DataCommand, DataCommands
from gateway.data.records import DataRecords, DataState, DataStatus, Reason, Snapshot, snapshot_key
from gateway.errors import StorageUnavailable
from gateway.ids import now_iso
from gateway.loops import every
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import open_storage
from workers.hosting.data_packer import Turns
from workers.hosting.packing import DataError
from workers.sandbox.keeper import UNMEASURABLE
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

COMMAND_SECONDS = 3_600.0  # for one command, with outages of the storage
REPEATED = ("undo", "forget")  # commands that nobody waits for long enough, and that are repeated until they succeed
REPEAT_SECONDS = 30.0


class CommandAgent(ABC):
    """Takes the commands, keeps the snapshots that they make, and removes those of apps that were deleted."""

    def __init__(self, settings: Settings, registry: Registry, turns: Turns) -> None:
        self._settings, self._registry, self._turns = settings, registry, turns
        self._storage = open_storage(settings)
        self._records, self._commands = DataRecords(registry.store), DataCommands(registry.store)
        self._running: dict[str, asyncio.Task[None]] = {}  # by command, or what else has a name

    @abstractmethod
    async def _act(self, command: DataCommand) -> DataAnswer:
        """Carries out a command. May raise DataError, OSError and StorageUnavailable."""

    async def _take_commands(self) -> None:
        for command in await self._commands.list_commands():
            if command.id not in self._running:
                self._start(command.id, self._carry_out(command))

    async def _run_rounds(self, *rounds: tuple[float, Callable[[], Awaitable[None]]]) -> NoReturn:
        """Takes each step again after so many seconds, until canceled. Then ends what is running."""
        repeating = [asyncio.create_task(every(seconds, step, "data.round_failed")) for seconds, step in rounds]
        try:
            await asyncio.gather(*repeating)
        finally:
            tasks = [*repeating, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AssertionError("the rounds never end")

    def _start(self, name: str, work: Coroutine[object, object, None]) -> None:
        self._running[name] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._running.pop(name))

    async def _carry_out(self, command: DataCommand) -> None:
        async with self._turns.exclusive(command.app, command.account):
            try:
                answer = await self._answer(command)
                await until_redis_answers(lambda: self._commands.answer(command, answer))
            except Exception as error:  # the command is repeated until its end
                logger.error("data.command_failed", app=command.app, action=command.action, exc_info=error)
            else:
                return
        await asyncio.sleep(REPEAT_SECONDS)

    async def _answer(self, command: DataCommand) -> DataAnswer:
        if time.time() > command.ends:
            return DataAnswer(error="The host with the app's data was away; try again.")
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                return await self._act(command)
        except (DataError, OSError, StorageUnavailable) as error:
            if command.action in REPEATED:
                raise
            return DataAnswer(error=_explain(error, command))

    # -- snapshots -------------------------------------------------------------------------------------------

    async def _store(self, app_id: str, packed: Path, reason: Reason, deploy: str, snapshot_id: str) -> Snapshot:
        size = (await asyncio.to_thread(packed.stat)).st_size
        await self._storage.put(snapshot_key(app_id, snapshot_id), packed)
        return Snapshot(snapshot_id, now_iso(), size, reason, deploy or msgspec.UNSET)

    async def _keep(self, account: str, app_id: str, snapshot: Snapshot) -> None:
        """Records a snapshot that is stored, and removes those that it replaces."""
        replaced = await until_redis_answers(lambda: self._records.add_snapshot(account, app_id, snapshot))
        with contextlib.suppress(StorageUnavailable):
            await self._storage.delete([snapshot_key(app_id, each) for each in replaced])
        logger.info("data.snapshot", app=app_id, id=snapshot.id, reason=snapshot.reason, bytes=snapshot.bytes)

    async def _find_made(self, command: DataCommand) -> Snapshot | None:
        """Returns the snapshot that the command had made before this worker was restarted, if any."""
        made = await until_redis_answers(lambda: self._records.list_snapshots(command.account, command.app))
        return next((each for each in made if each.id == snapshot_id_of(command)), None)

    async def _remove_expired(self) -> None:
        """Removes the snapshots of apps that were deleted a week ago."""
        for account, record_id in await self._records.list_expired():
            deleted = await self._records.read_deleted(account, record_id)
            if deleted is not None:
                await self._storage.delete([snapshot_key(deleted.appId, each.id) for each in deleted.snapshots])
            await self._records.remove_deleted(account, record_id)


def describe_status(used: int, limit: int, state: DataState) -> DataStatus:
    """Returns what account holders see of the data, which take so many bytes."""
    problem = ""
    if state == "full":
        what = f"take {-(-used // MIB)} MiB" if used < UNMEASURABLE else "contain folders that cannot be measured"
        problem = (
            f"The app's data {what}, and its plan allows {limit // MIB} MiB, so the app is stopped. Download a "
            "snapshot if you need the data. Then clear them, restore an earlier snapshot, or choose a larger plan."
        )
    return DataStatus(used if used < UNMEASURABLE else limit + 1, state, problem)


def snapshot_id_of(command: DataCommand) -> str:
    """Returns the id of the snapshot that the command makes: the same when the command is repeated."""
    return f"snp_{command.id.partition('_')[2]}"


def _explain(error: Exception, command: DataCommand) -> str:
    """Returns the error for account holders."""
    match error:
        case DataError():
            return str(error)
        case StorageUnavailable():
            return "The storage of snapshots does not answer; try again later."
        case TimeoutError():
            return "It took too long; try again later."
    logger.error("data.command_failed", app=command.app, action=command.action, exc_info=error)
    return "An internal error occurred; try again later."
