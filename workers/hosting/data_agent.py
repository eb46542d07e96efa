"""Takes care of the data of the apps on this host: limits, reports, snapshots, and commands of account holders.

A snapshot is packed by a process in the sandbox, as the app's user, while the app runs (`workers/sandbox/pack.py`).
What that process writes is as little trusted as the app: it is unpacked in the sandbox too. Before files are replaced
or removed, the app stops, and they are kept as a snapshot.

Every command can be repeated, because it stays queued until it has an answer (`gateway/data/commands.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn
from weakref import WeakValueDictionary

import msgspec
import structlog

from gateway.accounts.records import SLUG
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_canceled
from gateway.data.commands import DataAnswer, DataCommand, DataCommands
from gateway.data.records import DataRecords, DataState, DataStatus, Reason, Snapshot, snapshot_key
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import new_id, now_iso
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import fetch_object, open_storage
from workers.hosting.data import FOLDER, GONE, REPLACED, AppData, is_empty, list_data
from workers.hosting.releases import KEPT_AFTER_DELETION_SECONDS, Releases, Site, remove_folder
from workers.hosting.serving import run_in_thread
from workers.hosting.watchdog import read_state
from workers.sandbox import pack
from workers.sandbox.keeper import UNMEASURABLE, measure_data
from workers.sandbox.sandbox import MIB, Command, Sandbox, SandboxLimits

logger = structlog.get_logger()

POLL_SECONDS = 0.5  # between looks for commands
REPORT_SECONDS = 2.0  # between reports of what has changed
REPORT_ALL_SECONDS = 3_600.0  # between reports of everything, because reports expire
PLANS_SECONDS = 10.0  # between looks at the plans of accounts
TIDY_SECONDS = 600.0  # between looks for what is due or no longer needed
DAILY_SECONDS = 86_400.0
REPLACED_SECONDS = 86_400.0  # that files before a restore are kept if their deploy never ends
PACK_SECONDS, UNPACK_SECONDS = 1_800.0, 1_800.0
COMMAND_SECONDS = 3_600.0  # for one command, with outages of the storage
MOST_FILES = 20_000_000  # of one app; the bytes bound them first
ARCHIVE_BYTES = 1 << 36  # of a snapshot; the limit of the data bounds it first
PARALLEL = 4  # commands
REPEATED = ("undo", "forget")  # commands that nobody waits for long enough, and that are repeated until they succeed
REPEAT_SECONDS = 30.0
MAX_NOTES = 20
COPY = "copy"  # in place of a deploy, when another host's data replace those of this one

_PACK = Path(pack.__file__).read_text()


class DataError(Exception):
    """A reason why a command fails. Account holders see the message."""


class DataAgent:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        sandbox: Sandbox,
        owns: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`owns` tells whether this host has the data of an app (id)."""
        self._settings, self._registry, self._sandbox, self.owns = settings, registry, sandbox, owns
        self._folder = Path(settings.data_dir).resolve()
        self._storage = open_storage(settings)
        self._records, self._commands = DataRecords(registry.store), DataCommands(registry.store)
        self._running: dict[str, asyncio.Task[None]] = {}  # by command
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by app
        self._slots = asyncio.Semaphore(PARALLEL)
        self._seen: dict[str, tuple[object, ...]] = {}  # by app: what its last report was made from

    async def run(self) -> NoReturn:
        """Runs until canceled."""
        for data in await run_in_thread(list_data, self._folder):
            await run_in_thread(data.recover)
            self._site(data).unmark_stopped()  # the watchdog marks it again
        rounds = (
            asyncio.create_task(self._repeat(self._take_commands, lambda: POLL_SECONDS)),
            asyncio.create_task(self._repeat(self._report, lambda: REPORT_SECONDS)),
            asyncio.create_task(self._repeat(self._apply_plans, lambda: PLANS_SECONDS)),
            asyncio.create_task(self._repeat(self._tidy, lambda: TIDY_SECONDS)),
        )
        try:
            await asyncio.gather(*rounds)
        finally:
            tasks = [*rounds, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AssertionError("the rounds never end")

    @staticmethod
    async def _repeat(work: Callable[[], object], pause: Callable[[], float]) -> NoReturn:
        while True:
            try:
                await work()  # type: ignore[misc]
            except BackboneUnavailable:  # the next round tries again
                pass
            except Exception as error:  # one tenant's data must not stop the others
                logger.error("data.round_failed", exc_info=error)
            end_if_canceled()
            await asyncio.sleep(pause())

    def _list_owned(self) -> list[AppData]:
        return [data for data in list_data(self._folder) if data.exists and self.owns(data.app_id)]

    # -- limits and reports ----------------------------------------------------------------------------------

    async def _apply_plans(self) -> None:
        """Sets the limits by the accounts' plans. While Redis is unavailable, the last ones apply."""
        owned = {data.app_id: data for data in await run_in_thread(self._list_owned)}
        for app_id, (app, account) in (await self._registry.read_apps([*owned])).items():
            if app.account == owned[app_id].account:
                owned[app_id].limit = self._settings.app_data[account.plan] * MIB

    async def _find_limit(self, account_id: str) -> int:
        account = await until_redis_answers(lambda: self._registry.account(account_id))
        return self._settings.app_data["free" if account is None else account.plan] * MIB

    async def _report(self) -> None:
        changed = await run_in_thread(self._find_changes)
        await self._records.write_statuses([(data.account, data.app_id, status) for data, status, _ in changed])
        self._seen |= {data.app_id: seen for data, _, seen in changed}

    def _find_changes(self) -> list[tuple[AppData, DataStatus, tuple[object, ...]]]:
        """Returns the apps to report. Compares only times, because most apps of a host may sleep."""
        changed: list[tuple[AppData, DataStatus, tuple[object, ...]]] = []
        top, due = self._folder / FOLDER, time.monotonic() // REPORT_ALL_SECONDS
        for name in os.listdir(top) if top.is_dir() else ():
            seen = (due, *self._read_times(f"{top}/{name}", name))
            if self._seen.get(name) == seen or not SLUG.fullmatch(name) or not self.owns(name):
                continue
            data = AppData(self._folder, name)
            if data.exists:
                changed.append((data, self._describe(data, self._site(data)), seen))
        return changed

    def _read_times(self, folder: str, app_id: str) -> tuple[object, ...]:
        """Returns the times of the last changes of what a report is made from."""
        current, changed, stated = "", 0, 0
        with contextlib.suppress(OSError):
            changed = os.stat(folder).st_mtime_ns  # the files in it are replaced, never changed
            current = os.readlink(f"{self._folder}/releases/{app_id}/live/current")
            stated = os.stat(f"{self._folder}/running/{current}.state").st_mtime_ns
        return changed, current, stated

    def _site(self, data: AppData) -> Site:
        return Site(self._folder / "releases" / data.app_id / "live")

    def _describe(self, data: AppData, site: Site) -> DataStatus:
        used, limit = data.used, data.limit or 0
        state, problem = _find_state(data, site, self._folder), ""
        if state == "full":
            what = f"take {-(-used // MIB)} MiB" if used < UNMEASURABLE else "contain folders that cannot be measured"
            problem = (
                f"The app's data {what}, and its plan allows {limit // MIB} MiB, so the app is stopped. Download a "
                "snapshot if you need the data. Then clear them, restore an earlier snapshot, or choose a larger plan."
            )
        used = used if used < UNMEASURABLE else limit + 1
        return DataStatus(used, state, problem)

    # -- commands --------------------------------------------------------------------------------------------

    async def _take_commands(self) -> None:
        for command in await self._commands.list_commands():
            if command.id not in self._running and self.owns(command.app):
                self._running[command.id] = task = asyncio.create_task(self._carry_out(command))
                task.add_done_callback(lambda _, ended=command.id: self._running.pop(ended))  # type: ignore[misc]

    async def _carry_out(self, command: DataCommand) -> None:
        async with self._exclusive(command.app):
            try:
                answer = await self._answer(command)
                await until_redis_answers(lambda: self._commands.answer(command, answer))
            except Exception as error:  # the command is repeated until its end
                logger.error("data.command_failed", app=command.app, action=command.action, exc_info=error)
            else:
                return
        await asyncio.sleep(REPEAT_SECONDS)

    @asynccontextmanager
    async def _exclusive(self, app_id: str) -> AsyncIterator[None]:
        """Excludes other work on the app's data, and bounds the work on all data."""
        lock = self._locks.setdefault(app_id, asyncio.Lock())
        async with lock, self._slots:
            yield

    async def _answer(self, command: DataCommand) -> DataAnswer:
        if time.time() > command.ends:
            return DataAnswer(error="The host with the app's data was away; try again.")
        actions = {
            "snapshot": self._make_snapshot,
            "restore": self._restore,
            "undo": self._undo,
            "confirm": self._confirm,
            "clear": self._clear,
            "forget": self._forget,
        }
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                return await actions[command.action](AppData(self._folder, command.app), command)
        except (DataError, OSError, StorageUnavailable) as error:
            if command.action in REPEATED:
                raise
            return DataAnswer(error=_explain(error, command))

    async def _make_snapshot(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.account != command.account or is_empty(data.files):
            return DataAnswer()
        return await self._keep(data, command.account, command.reason, command.deploy, _snapshot_id(command.id))

    async def _restore(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.was_replaced(command.deploy):  # before this worker was restarted
            return await self._find_made(command)
        limit = await self._find_limit(command.account)
        with data.running(command.account, limit):
            data.limit = limit
        try:
            incoming = await self._fetch(data, command.source, limit)
            async with self._stopped(data):
                answer = await self._make_snapshot(data, command)
                await run_in_thread(data.replace, incoming, command.deploy)
            return answer
        finally:
            await run_in_thread(remove_folder, data.folder / "incoming")
            (data.folder / "incoming.tar.gz").unlink(missing_ok=True)

    async def _find_made(self, command: DataCommand) -> DataAnswer:
        """Returns the snapshot that the command had made before this worker was restarted, if any."""
        made = await until_redis_answers(lambda: self._records.list_snapshots(command.account, command.app))
        return DataAnswer(next((each for each in made if each.id == _snapshot_id(command.id)), None))

    async def _undo(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.was_replaced(command.deploy):
            async with self._stopped(data):
                await run_in_thread(data.undo, command.deploy)
        return DataAnswer()

    async def _confirm(self, data: AppData, command: DataCommand) -> DataAnswer:
        await run_in_thread(data.confirm, command.deploy)
        return DataAnswer()

    async def _clear(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.account != command.account or is_empty(data.files):
            return DataAnswer()
        async with self._stopped(data):
            answer = await self._make_snapshot(data, command)
            await run_in_thread(data.clear)
        return answer

    async def _forget(self, data: AppData, command: DataCommand) -> DataAnswer:
        """Keeps the files of a deleted app as a snapshot, and removes them."""
        if not data.folder.is_dir():
            return DataAnswer()
        releases, site = Releases(self._folder), self._site(data)
        if site.account == command.account and site.current is not None:
            releases.stop(site.current)
        async with self._stopped(data):
            files = await run_in_thread(data.set_aside, command.account)
            answer = DataAnswer()
            if not is_empty(files):
                snapshot, notes = await self._pack_and_store(data, files, "clear", "", _snapshot_id(command.id))
                add = self._records.add_last_snapshot
                await until_redis_answers(lambda: add(command.account, command.source, snapshot))
                answer = DataAnswer(snapshot, notes=notes)
            await run_in_thread(remove_folder, files)
        self._seen.pop(data.app_id, None)
        return answer

    @asynccontextmanager
    async def _stopped(self, data: AppData) -> AsyncIterator[None]:
        with ExitStack() as stack:
            try:
                await run_in_thread(stack.enter_context, data.stopped())
            except TimeoutError:
                raise DataError("The app did not stop in time; try again.") from None
            yield

    # -- snapshots -------------------------------------------------------------------------------------------

    async def _keep(self, data: AppData, account: str, reason: Reason, deploy: str, snapshot_id: str) -> DataAnswer:
        """Makes a snapshot, and removes those that it replaces."""
        snapshot, notes = await self._pack_and_store(data, data.files, reason, deploy, snapshot_id)
        replaced = await until_redis_answers(lambda: self._records.add_snapshot(account, data.app_id, snapshot))
        with contextlib.suppress(StorageUnavailable):
            await self._storage.delete([snapshot_key(data.app_id, each) for each in replaced])
        logger.info("data.snapshot", app=data.app_id, id=snapshot.id, reason=reason, bytes=snapshot.bytes)
        return DataAnswer(snapshot, notes=notes)

    async def _pack_and_store(
        self, data: AppData, files: Path, reason: Reason, deploy: str, snapshot_id: str
    ) -> tuple[Snapshot, list[str]]:
        packed = data.folder / "packed.tar.gz"
        try:
            notes = await self._pack(data, files, packed)
            size = packed.stat().st_size
            await self._storage.put(snapshot_key(data.app_id, snapshot_id), packed)
        finally:
            packed.unlink(missing_ok=True)
        return Snapshot(snapshot_id, now_iso(), size, reason, deploy or msgspec.UNSET), notes

    async def _pack(self, data: AppData, files: Path, packed: Path) -> list[str]:
        """Packs the files in the sandbox. Returns what the archive lacks. Raises DataError."""
        work = data.folder / "work"
        most = 2 * max(data.limit or 0, MIB)  # an app may exceed its limit for some seconds
        limits = SandboxLimits(seconds=PACK_SECONDS, memory=512 * MIB, disk=4 * most, inodes=MOST_FILES)
        notes: list[str] = []
        with ExitStack() as stack:
            uid = await run_in_thread(stack.enter_context, data.user(self._sandbox, files))
            await run_in_thread(remove_folder, work)
            work.mkdir(mode=0o700)
            self._sandbox.give_to_user(work, uid)
            command = Command(
                program=_PACK,
                arguments=[*map(str, (files, work / "packed", work / "copy", most))],
                folder=work,
                environment=self._sandbox.environment,
                write=[work, files],
                limits=limits,
            )
            try:
                outcome = await self._sandbox.run(command, uid, lambda line: notes.append(line[:300]))
                if not outcome.ok:
                    reason = outcome.describe("packing the data", limits)
                    logger.error("data.not_packed", app=data.app_id, reason=reason, last=notes[-1:])
                    raise DataError(f"No snapshot was made: {reason}.")
                _take_file(work / "packed", packed)
            finally:
                await run_in_thread(remove_folder, work)
        if notes:
            logger.warning("data.left_out", app=data.app_id, count=len(notes))
        return notes[:MAX_NOTES]

    async def _fetch(self, data: AppData, key: str, limit: int, digest: str = "") -> Path:
        """Unpacks a snapshot into a new folder, if it has this SHA-256 ('' for any). Raises DataError."""
        archive, incoming = data.folder / "incoming.tar.gz", data.folder / "incoming"
        if not await fetch_object(self._storage, key, archive, ARCHIVE_BYTES):
            raise DataError("the snapshot is no longer kept")
        if digest and await run_in_thread(_digest, archive) != digest:
            raise DataError("the snapshot is damaged")
        await run_in_thread(remove_folder, incoming)
        incoming.mkdir(mode=0o700)
        lines = [""]
        with ExitStack() as stack:
            uid = await run_in_thread(stack.enter_context, data.user(self._sandbox))
            self._sandbox.give_to_user(incoming, uid)
            limits = SandboxLimits(seconds=UNPACK_SECONDS, memory=512 * MIB, disk=2 * limit + MIB, inodes=MOST_FILES)
            command = Command(
                unpack=(MOST_FILES, limit),
                folder=incoming,
                environment=self._sandbox.environment,
                write=[incoming],
                limits=limits,
            )
            with archive.open("rb") as stdin:
                outcome = await self._sandbox.run(command, uid, lines.append, stdin=stdin)
        if not outcome.ok:
            reason = lines[-1] if lines[-1] and not outcome.why else outcome.describe("unpacking it", limits)
            raise DataError(f"the snapshot can't be restored: {reason}")
        if await run_in_thread(measure_data, incoming) > limit:
            raise DataError(f"the snapshot can't be restored: it has more than the plan's {limit // MIB} MiB")
        return incoming

    # -- copies for other hosts ------------------------------------------------------------------------------

    async def store_copy(self, data: AppData, key: str) -> str:
        """Packs the data into an object of the storage. Returns its SHA-256. Raises DataError."""
        packed = data.folder / "copy.tar.gz"
        async with self._exclusive(data.app_id):
            try:
                await self._pack(data, data.files, packed)
                digest = await run_in_thread(_digest, packed)
                await self._storage.put(key, packed)
            finally:
                packed.unlink(missing_ok=True)
        return digest

    async def fetch_copy(self, data: AppData, account: str, key: str, digest: str) -> None:
        """Replaces the data by those of an object of the storage. The app does not run. Raises DataError."""
        limit = await self._find_limit(account)
        async with self._exclusive(data.app_id):
            with data.running(account, limit):
                data.limit = limit
            await run_in_thread(data.confirm, COPY)  # left by a worker that was killed
            try:
                incoming = await self._fetch(data, key, 2 * max(limit, MIB), digest)  # apps exceed limits for seconds
                await run_in_thread(data.replace, incoming, COPY)
                await run_in_thread(data.confirm, COPY)
            finally:
                await run_in_thread(remove_folder, data.folder / "incoming")
                (data.folder / "incoming.tar.gz").unlink(missing_ok=True)

    # -- what is due -----------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        for data in await run_in_thread(list_data, self._folder):
            try:
                if self.owns(data.app_id) and data.exists:
                    await self._make_daily(data)
                await self._tidy_folder(data)
            except (DataError, OSError) as error:  # one app must not stop the others
                logger.error("data.not_tidied", app=data.app_id, exc_info=error)
        for account, record_id in await self._records.list_expired():
            deleted = await self._records.read_deleted(account, record_id)
            if deleted is not None:
                await self._storage.delete([snapshot_key(deleted.appId, each.id) for each in deleted.snapshots])
            await self._records.remove_deleted(account, record_id)

    async def _make_daily(self, data: AppData) -> None:
        """Makes a snapshot a day after the last one, if something has changed."""
        record, now = data.folder / "daily", time.time()
        at, before = record.read_text().split() if record.exists() else ("", "-")
        if at and now - float(at) < DAILY_SECONDS:
            return
        async with self._exclusive(data.app_id):
            changed = await run_in_thread(data.fingerprint) != before
            if at and changed and not is_empty(data.files):
                try:
                    await self._keep(data, data.account, "daily", "", new_id("snp"))
                except (DataError, StorageUnavailable) as error:
                    logger.error("data.no_daily_snapshot", app=data.app_id, reason=str(error))
                    return
                before = await run_in_thread(data.fingerprint)
            record.write_text(f"{now} {before}")

    async def _tidy_folder(self, data: AppData) -> None:
        """Removes what nobody needs: the data of an app a week after its deletion, and what was set aside."""
        gone = data.folder / "gone"
        if not data.exists or await self._registry.find_app(data.app_id) is not None:
            gone.unlink(missing_ok=True)
        elif not gone.exists():
            gone.touch()
        elif time.time() - gone.stat().st_mtime > KEPT_AFTER_DELETION_SECONDS:
            async with self._exclusive(data.app_id), self._stopped(data):
                await run_in_thread(data.remove)
        for prefix, seconds in ((REPLACED, REPLACED_SECONDS), (GONE, KEPT_AFTER_DELETION_SECONDS)):
            for path in data.folder.glob(f"{prefix}*"):
                if time.time() - path.stat().st_ctime > seconds:
                    await run_in_thread(remove_folder, path)


def _find_state(data: AppData, site: Site, folder: Path) -> DataState:
    if data.is_held:
        return "restoring"
    if site.current is None or not (site.release(site.current) / "start").exists():
        return "none"
    if data.is_full:
        return "full"
    return "asleep" if read_state(folder, site.current).asleep else "running"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _snapshot_id(command_id: str) -> str:
    """Returns the same id when the command is repeated."""
    return f"snp_{command_id.partition('_')[2]}"


def _take_file(path: Path, target: Path) -> None:
    """Moves a file that a process in the sandbox has written. Raises DataError for anything else."""
    path.rename(target)
    status = target.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise DataError("No snapshot was made.")
    if os.geteuid() == 0:
        os.chown(target, 0, 0, follow_symlinks=False)
    target.chmod(0o600)
