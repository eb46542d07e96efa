"""Takes care of the data of the apps on this host: limits, reports, snapshots, and commands of account holders.

A snapshot is packed while the app runs (`packing.py`). Before files are replaced or removed, the app stops, and they
are kept as a snapshot.

Every command can be repeated, because it stays queued until it has an answer (`gateway/data/commands.py`).
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog

from gateway.accounts.records import SLUG
from gateway.accounts.registry import Registry
from gateway.cancellation import run_in_thread
from gateway.data.commands import DataAnswer, DataCommand, DataCommands
from gateway.data.records import DataRecords, DataState, DataStatus, Reason, Snapshot, snapshot_key
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import new_id, now_iso
from gateway.loops import every
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import open_storage
from workers.hosting.data import FOLDER, GONE, REPLACED, AppData, is_empty, list_data
from workers.hosting.packing import DataError, DataPacker
from workers.hosting.releases import KEPT_AFTER_DELETION_SECONDS, Releases, Site, remove_folder
from workers.hosting.watchdog import is_running, read_state
from workers.sandbox.keeper import UNMEASURABLE
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

POLL_SECONDS = 0.5  # between looks for commands
REPORT_SECONDS = 0.5  # between reports of what has changed
REPORT_ALL_SECONDS = 3_600.0  # between reports of everything, because reports expire
PLANS_SECONDS = 5.0  # between looks at the plans of accounts
TIDY_SECONDS = 600.0  # between looks for what is due or no longer needed
DAILY_SECONDS = 86_400.0
REPLACED_SECONDS = 86_400.0  # that files before a restore are kept if their deploy never ends
START_SECONDS, START_POLL_SECONDS = 5.0, 0.05  # in which an app whose data were cleared usually starts
COMMAND_SECONDS = 3_600.0  # for one command, with outages of the storage
REPEATED = ("undo", "forget")  # commands that nobody waits for long enough, and that are repeated until they succeed
REPEAT_SECONDS = 30.0


class DataAgent:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        packer: DataPacker,
        owns: Callable[[str], bool],
    ) -> None:
        """`owns` tells whether this host has the data of an app (id)."""
        self._settings, self._registry, self._packer, self._owns = settings, registry, packer, owns
        self._folder = Path(settings.data_dir).resolve()
        self._storage = open_storage(settings)
        self._records, self._commands = DataRecords(registry.store), DataCommands(registry.store)
        self._running: dict[str, asyncio.Task[None]] = {}  # by command
        self._seen: dict[str, tuple[object, ...]] = {}  # by app: what its last report was made from

    async def run(self) -> NoReturn:
        """Runs until canceled."""
        for data in await run_in_thread(list_data, self._folder):
            await run_in_thread(data.recover)
            self._site(data).unmark_stopped()  # the watchdog marks it again
        rounds = (
            asyncio.create_task(every(POLL_SECONDS, self._take_commands, "data.round_failed")),
            asyncio.create_task(every(REPORT_SECONDS, self._report, "data.round_failed")),
            asyncio.create_task(every(PLANS_SECONDS, self._apply_plans, "data.round_failed")),
            asyncio.create_task(every(TIDY_SECONDS, self._tidy, "data.round_failed")),
        )
        try:
            await asyncio.gather(*rounds)
        finally:
            tasks = [*rounds, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AssertionError("the rounds never end")

    def _list_owned(self) -> list[AppData]:
        return [data for data in list_data(self._folder) if data.exists and self._owns(data.app_id)]

    # -- limits and reports ----------------------------------------------------------------------------------

    async def _apply_plans(self) -> None:
        """Sets the limits by the accounts' plans. While Redis is unavailable, the last ones apply."""
        await self._set_limits(await run_in_thread(self._list_owned))

    async def _set_limits(self, apps: Collection[AppData]) -> None:
        owned = {data.app_id: data for data in apps}
        for app_id, (app, account) in (await self._registry.read_apps([*owned])).items():
            if app.account == owned[app_id].account:
                owned[app_id].limit = self._settings.app_data[account.plan] * MIB

    async def _report(self) -> None:
        changed = await run_in_thread(self._find_changes)
        await self._set_limits([data for data, _, _ in changed if data.app_id not in self._seen])
        await self._records.write_statuses([(data.account, data.app_id, status) for data, status, _ in changed])
        self._seen |= {data.app_id: seen for data, _, seen in changed}

    def _find_changes(self) -> list[tuple[AppData, DataStatus, tuple[object, ...]]]:
        """Returns the apps to report. Compares only times, because most apps of a host may sleep."""
        changed: list[tuple[AppData, DataStatus, tuple[object, ...]]] = []
        top, due = self._folder / FOLDER, time.monotonic() // REPORT_ALL_SECONDS
        for name in os.listdir(top) if top.is_dir() else ():
            seen = (due, *self._read_times(f"{top}/{name}", name))
            if self._seen.get(name) == seen or not SLUG.fullmatch(name) or not self._owns(name):
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
            if command.id not in self._running and self._owns(command.app):
                self._running[command.id] = task = asyncio.create_task(self._carry_out(command))
                task.add_done_callback(lambda _, ended=command.id: self._running.pop(ended))  # type: ignore[misc]

    async def _carry_out(self, command: DataCommand) -> None:
        async with self._packer.exclusive(command.app, command.account):
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
        limit = await self._packer.prepare(data, command.account)
        async with self._packer.unpacked(data, command.source, limit) as incoming, self._stopped(data):
            answer = await self._make_snapshot(data, command)
            await run_in_thread(data.replace, incoming, command.deploy)
        return answer

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
        await self._until_started(data)
        return answer

    async def _until_started(self, data: AppData) -> None:
        """Waits until the app runs again, so that the account holder's next request is not refused."""
        site, ends = self._site(data), time.monotonic() + START_SECONDS
        while _find_state(data, site, self._folder) == "running" and time.monotonic() < ends:
            if site.current is not None and _is_reachable(self._folder, site.current):
                return
            await asyncio.sleep(START_POLL_SECONDS)

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
        async with self._packer.packed(data, files) as (packed, notes):
            size = packed.stat().st_size
            await self._storage.put(snapshot_key(data.app_id, snapshot_id), packed)
        return Snapshot(snapshot_id, now_iso(), size, reason, deploy or msgspec.UNSET), notes

    # -- what is due -----------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        present = await run_in_thread(list_data, self._folder)
        self._seen = {data.app_id: seen for data in present if (seen := self._seen.get(data.app_id)) is not None}
        for data in present:
            try:
                if self._owns(data.app_id) and data.exists:
                    await self._make_daily(data)
                await self._tidy_folder(data)
            except BackboneUnavailable:
                raise
            except Exception as error:  # one app must not stop the others
                logger.error("data.not_tidied", app=data.app_id, exc_info=error)
        for account, record_id in await self._records.list_expired():
            deleted = await self._records.read_deleted(account, record_id)
            if deleted is not None:
                await self._storage.delete([snapshot_key(deleted.appId, each.id) for each in deleted.snapshots])
            await self._records.remove_deleted(account, record_id)

    async def _make_daily(self, data: AppData) -> None:
        """Makes a snapshot a day after the last one, if something has changed."""
        record, now = data.folder / "daily", time.time()
        at, _, before = record.read_text().partition(" ") if record.exists() else ("", "", "")
        if at and now - float(at) < DAILY_SECONDS:
            return
        async with self._packer.exclusive(data.app_id, data.account):
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
            async with self._packer.exclusive(data.app_id, data.account), self._stopped(data):
                await run_in_thread(data.remove)
        for prefix, seconds in ((REPLACED, REPLACED_SECONDS), (GONE, KEPT_AFTER_DELETION_SECONDS)):
            for path in data.folder.glob(f"{prefix}*"):
                if time.time() - path.stat().st_ctime > seconds:
                    await run_in_thread(remove_folder, path)


def _is_reachable(folder: Path, deploy_id: str) -> bool:
    state = read_state(folder, deploy_id)
    return is_running(state.keeper, state.began) and os.path.exists(state.socket)


def _find_state(data: AppData, site: Site, folder: Path) -> DataState:
    if data.is_held:
        return "restoring"
    if site.current is None or not (site.release(site.current) / "start").exists():
        return "none"
    if data.is_full:
        return "full"
    return "asleep" if read_state(folder, site.current).asleep else "running"


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
