"""Takes care of the data of apps: commands of account holders, reports, daily snapshots, and what deleted apps leave.

A `DataDriver` knows where the data are: in folders of this host (`workers/hosting/data.py`), or in volumes of a cluster
(`workers/kubernetes/data.py`). What happens to them is decided here, for both.

Every command can be repeated, because it stays queued until it has an answer (`gateway/data/commands.py`). A snapshot
has an id that the command determines, so a command that is repeated makes the same one again, or finds it. Files are
replaced only after the snapshot of those from before is stored and recorded (`data_keeper.py`). A command that finds
that it has replaced them changes nothing: the app may have written since.
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn
from weakref import WeakValueDictionary
from zlib import crc32

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.cancellation import RunningTasks
from gateway.data.commands import COMMAND_SECONDS, DataAnswer, DataCommand, DataCommands
from gateway.data.records import DataRecords, DataState, DataStatus, Reason, Snapshot, snapshot_key
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import new_id, now_iso
from gateway.loops import batched, every, until
from gateway.redis.client import patient
from gateway.settings import Settings
from gateway.storage import fetch_object, is_full, open_storage
from workers.engine.data_keeper import Handover, Keeper, Packed
from workers.engine.names import find_plan
from workers.engine.packing import DataError
from workers.sandbox.keeper import UNMEASURABLE
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

POLL_SECONDS = 0.5  # between looks for commands
TIDY_SECONDS = 600.0  # between looks for what is due or no longer needed
TIDY_PAUSE_SECONDS = 0.1  # between two apps, so that thousands of them take minutes
TIDY_READS = 50  # apps whose records are read together
DAILY_ROUNDS = 6  # of tidying, in one of which an app is asked whether its daily snapshot is due
FAILURES = (DataError, OSError, StorageUnavailable)  # of a command; any other exception is a fault of the service
REPEATED = ("undo", "forget")  # commands that nobody waits for long enough, and that are repeated until they succeed
REPEAT_SECONDS = 30.0
START_SECONDS, START_POLL_SECONDS = 5.0, 0.05  # in which an app whose data were cleared usually starts
ARCHIVE_BYTES = 1 << 36  # of a snapshot; the limit of the data bounds it first
PARALLEL, PARALLEL_OF_ACCOUNT = 4, 2


class DataDriver(ABC):
    """Where the data of apps are, and their snapshots. Methods may raise DataError and StorageUnavailable."""

    report_seconds: float  # between looks for changes to report

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._settings, self._registry, self._storage = settings, registry, open_storage(settings)
        self._folder = Path(settings.data_dir).resolve()
        self.records = DataRecords(registry.store)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by app
        self._slots = asyncio.Semaphore(PARALLEL)
        self._slots_of_accounts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def exclusive(self, app_id: str, account: str) -> AsyncIterator[None]:
        """Excludes other work on the app's data, and bounds the work on the account's data and on all data."""
        lock = self._locks.setdefault(app_id, asyncio.Lock())
        slots = self._slots_of_accounts.setdefault(account, asyncio.Semaphore(PARALLEL_OF_ACCOUNT))
        async with lock, slots, self._slots:
            yield

    # -- where they are --------------------------------------------------------------------------------------

    @abstractmethod
    def reach(
        self, app_id: str, account: str, *, create: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Keeper | None]:
        """Yields the keeper of the data; None if the account has no data of the app. They are not stale.

        `create`: makes a folder for the data of an app that has not run.
        """

    @abstractmethod
    def find_due(self, app_id: str, account: str) -> Keeper | None:
        """Returns the keeper of data of which a daily snapshot may be due. Waits for nothing."""

    @abstractmethod
    def forget(self, app_id: str, account: str) -> Handover:
        """Hands over the data of a deleted app, and removes them."""

    @abstractmethod
    async def find_changes(self) -> dict[tuple[str, str], DataStatus]:
        """Sets the limits of data by the accounts' plans. Returns what has changed, by account and app."""

    @abstractmethod
    async def list_apps(self) -> list[tuple[str, str]]:
        """Returns the apps with data, with their accounts."""

    @abstractmethod
    async def tidy(self, app_id: str, account: str, *, is_deleted: bool) -> None:
        """Removes what nobody needs. `is_deleted`: the account has no such app."""

    @abstractmethod
    async def has_started(self, app_id: str, account: str) -> bool:
        """Returns whether the app runs on its data, or is not meant to."""

    @abstractmethod
    def list_rounds(self, running: RunningTasks) -> Sequence[tuple[float, Callable[[], Awaitable[None]]]]:
        """Returns what else is done again after so many seconds. `running` has the work that it begins."""

    # -- their snapshots -------------------------------------------------------------------------------------

    async def find_limit(self, account: str) -> int:
        return self._settings.app_data[await find_plan(self._registry, account)] * MIB

    async def store(self, app_id: str, packed: Packed, reason: Reason, deploy: str, snapshot_id: str) -> Snapshot:
        size = (await asyncio.to_thread(packed.archive.stat)).st_size
        await self._storage.put(snapshot_key(app_id, snapshot_id), packed.archive)
        return Snapshot(snapshot_id, now_iso(), size, reason, deploy or msgspec.UNSET)

    async def keep(
        self, account: str, app_id: str, packed: Packed, reason: Reason, deploy: str, snapshot_id: str
    ) -> Snapshot:
        """Stores and records a snapshot, and removes those that it replaces."""
        snapshot = await self.store(app_id, packed, reason, deploy, snapshot_id)
        replaced = await patient(self.records).add_snapshot(account, app_id, snapshot)
        with contextlib.suppress(StorageUnavailable):
            await self._storage.delete([snapshot_key(app_id, each) for each in replaced])
        logger.info("data.snapshot", app=app_id, id=snapshot.id, reason=snapshot.reason, bytes=snapshot.bytes)
        return snapshot

    @asynccontextmanager
    async def fetched(self, app_id: str, key: str) -> AsyncIterator[Path]:
        """Yields an object of the storage as a file, for the one who works on the app's data."""
        archive = self._folder / f"fetched-{app_id}.tar.gz"
        try:
            if not await fetch_object(self._storage, key, archive, ARCHIVE_BYTES):
                raise DataError("the snapshot is no longer kept")
            yield archive
        finally:
            archive.unlink(missing_ok=True)

    async def bring_newest(self, keeper: Keeper, app_id: str, account: str) -> None:
        """Replaces the data, if they are stale, by their newest snapshot, if there is one. Then the app may run."""
        if not (report := await keeper.report()).stale:
            return
        [newest] = await patient(self.records).find_newest([(account, app_id)])
        if newest and newest not in report.replacements:  # by a worker that was killed
            limit = 2 * max(await self.find_limit(account), MIB)  # apps exceed limits for seconds
            async with (
                self.fetched(app_id, snapshot_key(app_id, newest)) as archive,
                keeper.restore(archive, newest, limit),
            ):
                pass
            logger.info("data.fetched", app=app_id, id=newest)
        await keeper.confirm(newest)
        await keeper.begin(newest)

    async def remove_expired(self) -> None:
        """Removes the snapshots of apps that were deleted a week ago."""
        for account, record_id in await self.records.list_expired():
            deleted = await self.records.read_deleted(account, record_id)
            if deleted is not None:
                await self._storage.delete([snapshot_key(deleted.appId, each.id) for each in deleted.snapshots])
            await self.records.remove_deleted(account, record_id)


class DataAgent:
    def __init__(self, registry: Registry, driver: DataDriver) -> None:
        self._registry, self._driver = registry, driver
        self._records, self._commands = driver.records, DataCommands(registry.store)
        self._running = RunningTasks()  # by command, or by the driver's name
        self._unwritten: dict[tuple[str, str], DataStatus] = {}  # reports, by account and app
        self._round = 0  # of tidying

    async def run(self) -> NoReturn:
        """Runs until canceled. Then ends what is running."""
        rounds = [
            (POLL_SECONDS, self._take_commands),
            (self._driver.report_seconds, self._report),
            (TIDY_SECONDS, self._tidy),
            *self._driver.list_rounds(self._running),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for seconds, step in rounds:
                    group.create_task(every(seconds, step, "data.round_failed"))
        finally:
            await self._running.cancel()
        raise AssertionError("the rounds never end")

    async def _report(self) -> None:
        self._unwritten |= await self._driver.find_changes()
        await self._records.write_statuses([(*key, status) for key, status in self._unwritten.items()])
        self._unwritten.clear()

    # -- commands --------------------------------------------------------------------------------------------

    async def _take_commands(self) -> None:
        for command in await self._commands.list_commands():
            self._running.start(self._carry_out(command), command.id)

    async def _carry_out(self, command: DataCommand) -> None:
        async with self._driver.exclusive(command.app, command.account):
            try:
                answer = await self._answer(command)
                await patient(self._commands).answer(command, answer)
            except FAILURES as error:  # the command is repeated until its end
                reason = str(error) or type(error).__name__
                logger.warning("data.command_repeated", app=command.app, action=command.action, reason=reason)
            except Exception as error:  # so is this one
                logger.error("data.command_failed", app=command.app, action=command.action, exc_info=error)
            else:
                return
        await asyncio.sleep(REPEAT_SECONDS)

    async def _answer(self, command: DataCommand) -> DataAnswer:
        if time.time() > command.ends:
            return DataAnswer(error="The host with the app's data was away; try again.", service_fault=True)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                return await (self._forget(command) if command.action == "forget" else self._act(command))
        except FAILURES as error:
            if command.action in REPEATED:
                raise
            service_fault = not isinstance(error, DataError) or error.service_fault
            return DataAnswer(error=_explain(error, command), is_full=is_full(error), service_fault=service_fault)

    async def _act(self, command: DataCommand) -> DataAnswer:
        change, creates = command.deploy or command.id, command.action == "restore"
        async with self._driver.reach(command.app, command.account, create=creates) as keeper:
            if keeper is None:
                return DataAnswer()
            match command.action:
                case "undo":
                    await keeper.undo(change)
                    return DataAnswer()
                case "confirm":
                    await keeper.confirm(change)
                    return DataAnswer()
            made = await self._find_made(command)
            if made if command.action == "snapshot" else change in (await keeper.report()).replacements:
                return DataAnswer(made)  # before this worker was restarted
            match command.action:
                case "restore":
                    limit = await self._driver.find_limit(command.account)
                    async with self._driver.fetched(command.app, command.source) as archive:
                        return await self._keep(command, keeper.restore(archive, change, limit))
                case "clear":
                    answer = await self._keep(command, keeper.clear(change))
                    # So that the account holder's next request is not refused.
                    started = partial(self._driver.has_started, command.app, command.account)
                    await until(started, START_POLL_SECONDS, START_SECONDS)
                    return answer
            return await self._keep(command, keeper.snapshot())

    async def _find_made(self, command: DataCommand) -> Snapshot | None:
        """Returns the snapshot that the command has made, if any."""
        made = await patient(self._records).list_snapshots(command.account, command.app)
        return next((each for each in made if each.id == snapshot_id_of(command)), None)

    async def _keep(self, command: DataCommand, handover: Handover) -> DataAnswer:
        """Keeps what is handed over as the command's snapshot. Then the handover takes effect."""
        async with handover as packed:
            if packed is None:
                return DataAnswer()
            snapshot = await self._driver.keep(
                command.account, command.app, packed, command.reason, command.deploy, snapshot_id_of(command)
            )
        return DataAnswer(snapshot, notes=packed.notes)

    async def _forget(self, command: DataCommand) -> DataAnswer:
        """Keeps the data of a deleted app as its last snapshot, and removes them."""
        async with self._driver.forget(command.app, command.account) as packed:
            if packed is None:
                return DataAnswer()
            snapshot = await self._driver.store(command.app, packed, "clear", "", snapshot_id_of(command))
            await patient(self._records).add_last_snapshot(command.account, command.source, snapshot)
        self._unwritten.pop((command.account, command.app), None)
        return DataAnswer(snapshot, notes=packed.notes)

    # -- what is due -----------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        self._round += 1
        for some in batched(await self._driver.list_apps(), TIDY_READS):
            found, _ = await self._registry.read_intact_apps([app_id for app_id, _ in some])
            present = {(app.id, app.account) for app, _ in found.values()}
            for app_id, account in some:
                try:
                    is_deleted = (app_id, account) not in present and await self._is_deleted(app_id, account)
                    await self._driver.tidy(app_id, account, is_deleted=is_deleted)
                    if not is_deleted and (crc32(app_id.encode()) + self._round) % DAILY_ROUNDS == 0:
                        await self._make_daily(app_id, account)
                except BackboneUnavailable:
                    raise
                except (DataError, OSError, StorageUnavailable) as error:
                    logger.error("data.no_daily_snapshot", app=app_id, reason=str(error))
                except Exception as error:  # one app must not stop the others
                    logger.error("data.not_tidied", app=app_id, exc_info=error)
                await asyncio.sleep(TIDY_PAUSE_SECONDS)
        await self._driver.remove_expired()

    async def _is_deleted(self, app_id: str, account: str) -> bool:
        app = await self._registry.find_app(app_id)
        return app is None or app.account != account

    async def _make_daily(self, app_id: str, account: str) -> None:
        """Makes a snapshot a day after the last one, if something has changed."""
        if (keeper := self._driver.find_due(app_id, account)) is None or await self._is_deleted(app_id, account):
            return
        async with self._driver.exclusive(app_id, account), keeper.daily() as packed:
            if packed is not None:
                await self._driver.keep(account, app_id, packed, "daily", "", new_id("snp"))


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
    if is_full(error):
        return "The disk of the service is full; tell the operator, who must make room there."
    match error:
        case DataError():
            return str(error)
        case StorageUnavailable():
            return "The storage of snapshots does not answer; try again later."
        case TimeoutError():
            return "It took too long; try again later."
    logger.error("data.command_failed", app=command.app, action=command.action, exc_info=error)
    return "An internal error occurred; try again later."
