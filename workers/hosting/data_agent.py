"""Takes care of the data of the apps on this host: limits, reports, snapshots, and commands of account holders.

A snapshot is packed while the app runs (`packing.py`). Before files are replaced or removed, the app stops, and they
are kept as a snapshot.

With a shared storage, the data may move: the newest snapshot is where the next host, or a cluster, goes on. Each host
notes which snapshots its files were made from (`data.py`). So one that served before, and finds a newer snapshot, takes
that instead of its own files. A clean stop of the worker makes a last snapshot of each app.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import structlog

from gateway.accounts.records import SLUG
from gateway.accounts.registry import Registry
from gateway.cancellation import run_in_thread
from gateway.data.commands import DataAnswer, DataCommand
from gateway.data.records import DataState, DataStatus, Reason, Snapshot
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import new_id
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from workers.hosting.data import FOLDER, AppData, is_empty, list_data
from workers.hosting.data_commands import CommandAgent, describe_status, snapshot_id_of
from workers.hosting.data_packer import DataPacker, stopped
from workers.hosting.packing import DataError
from workers.hosting.releases import KEPT_AFTER_DELETION_SECONDS, Releases, Site, remove_folder
from workers.hosting.watchdog import is_running, read_state
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

POLL_SECONDS = 0.5  # between looks for commands
REPORT_SECONDS = 0.5  # between reports of what has changed
REPORT_ALL_SECONDS = 3_600.0  # between reports of everything, because reports expire
PLANS_SECONDS = 5.0  # between looks at the plans of accounts
TIDY_SECONDS = 600.0  # between looks for what is due or no longer needed
LEAVE_SECONDS = 40.0  # in which a worker that stops makes its last snapshots
START_SECONDS, START_POLL_SECONDS = 5.0, 0.05  # in which an app whose data were cleared usually starts


class DataAgent(CommandAgent):
    def __init__(self, settings: Settings, registry: Registry, packer: DataPacker) -> None:
        super().__init__(settings, registry, packer.turns)
        self._packer, self._may_move = packer, bool(settings.storage_url)
        self._folder = Path(settings.data_dir).resolve()
        self._seen: dict[str, tuple[object, ...]] = {}  # by app: what its last report was made from

    async def run(self) -> NoReturn:
        """Runs until canceled."""
        await self._run_rounds(
            (POLL_SECONDS, self._take_commands),
            (REPORT_SECONDS, self._report),
            (PLANS_SECONDS, self._apply_plans),
            (TIDY_SECONDS, self._tidy),
        )

    def _list_present(self) -> list[AppData]:
        return [data for data in list_data(self._folder) if data.exists]

    # -- from host to host -----------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Ends what was interrupted, and marks the files that are older than elsewhere. Before any app runs.

        While Redis is unavailable, all files count as the newest ones.
        """
        for data in await run_in_thread(list_data, self._folder):
            await run_in_thread(data.recover)
            self._site(data).unmark_stopped()  # the watchdog marks it again
        if self._may_move:
            with contextlib.suppress(BackboneUnavailable):
                await self._mark_stale()

    async def _mark_stale(self) -> None:
        """Raises BackboneUnavailable."""
        apps = await run_in_thread(self._list_apps)
        newest = await self._records.find_newest([(account, app_id) for app_id, account in apps.items()])
        for (app_id, account), snapshot_id in zip(apps.items(), newest, strict=True):
            data = AppData(self._folder, app_id)
            if snapshot_id and not data.comes_from(snapshot_id):
                await run_in_thread(data.mark_stale, account, self._settings.app_data["free"] * MIB)
                logger.info("data.stale", app=app_id, newest=snapshot_id)
            elif snapshot_id:
                data.note_snapshot(snapshot_id)

    def _list_apps(self) -> dict[str, str]:
        """Returns the apps with data or a start command here, with their accounts."""
        sites = (Site(release.parent) for release in Releases(self._folder).releases_to_run().values())
        apps = {site.app_id: site.account for site in sites if not site.is_preview}
        return apps | {data.app_id: data.account for data in self._list_present()}

    async def bring(self, account: str, app_id: str) -> None:
        """Brings an app's newest snapshot here if this host has no files of it, or older ones. It does not run yet.

        Raises DataError and StorageUnavailable.
        """
        data = AppData(self._folder, app_id)
        if not self._may_move or (data.exists and data.account == account and not data.is_stale):
            return
        if newest := await self._packer.fetch_newest(data, account):
            logger.info("data.fetched", app=app_id, id=newest)

    async def leave(self) -> None:
        """Makes a last snapshot of each app's data that have changed, for the host that serves next."""
        if not self._may_move:
            return
        present = [data for data in await run_in_thread(self._list_present) if not data.is_stale]
        work = {asyncio.create_task(self._make_last(data)): data.app_id for data in present}
        if not work:
            return
        _, late = await asyncio.wait(work, timeout=LEAVE_SECONDS)
        for task in late:
            logger.error("data.not_kept", app=work[task], reason=f"it took longer than {LEAVE_SECONDS:.0f} seconds")
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    async def _make_last(self, data: AppData) -> None:
        try:
            async with self._turns.exclusive(data.app_id, data.account):
                app = await self._registry.find_app(data.app_id)
                [newest] = await self._records.find_newest([(data.account, data.app_id)])
                if app is None or app.account != data.account or (not newest and is_empty(data.files)):
                    return
                fingerprint = await run_in_thread(data.fingerprint)
                if not data.is_as_stopped(newest, fingerprint):
                    snapshot_id = new_id("snp")
                    await self._make(data, data.account, "stop", "", snapshot_id)
                    data.note_stop(snapshot_id, fingerprint)
        except (BackboneUnavailable, StorageUnavailable, DataError, OSError) as error:
            logger.error("data.not_kept", app=data.app_id, reason=str(error))

    # -- limits and reports ----------------------------------------------------------------------------------

    async def _apply_plans(self) -> None:
        """Sets the limits by the accounts' plans. While Redis is unavailable, the last ones apply."""
        await self._set_limits(await run_in_thread(self._list_present))

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
            if self._seen.get(name) == seen or not SLUG.fullmatch(name):
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
        state = _find_state(data, site, self._folder)  # before the size, which the keeper may write meanwhile
        return describe_status(data.used, data.limit or 0, state)

    # -- commands --------------------------------------------------------------------------------------------

    async def _act(self, command: DataCommand) -> DataAnswer:
        actions = {
            "snapshot": self._make_snapshot,
            "restore": self._restore,
            "undo": self._undo,
            "confirm": self._confirm,
            "clear": self._clear,
            "forget": self._forget,
        }
        return await actions[command.action](AppData(self._folder, command.app), command)

    async def _make_snapshot(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.account != command.account or is_empty(data.files):
            return DataAnswer()
        return await self._make(data, command.account, command.reason, command.deploy, snapshot_id_of(command))

    async def _restore(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.was_replaced(command.deploy):  # before this worker was restarted
            return DataAnswer(await self._find_made(command))
        limit = await self._packer.prepare(data, command.account)
        async with self._packer.fetched(data, command.source, limit) as incoming, stopped(data):
            answer = await self._make_snapshot(data, command)
            await run_in_thread(data.replace, incoming, command.deploy)
        return answer

    async def _undo(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.was_replaced(command.deploy):
            async with stopped(data):
                await run_in_thread(data.undo, command.deploy)
        return DataAnswer()

    async def _confirm(self, data: AppData, command: DataCommand) -> DataAnswer:
        await run_in_thread(data.confirm, command.deploy)
        return DataAnswer()

    async def _clear(self, data: AppData, command: DataCommand) -> DataAnswer:
        if data.account != command.account or is_empty(data.files):
            return DataAnswer()
        async with stopped(data):
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
        async with stopped(data):
            files = await run_in_thread(data.set_aside, command.account)
            answer = DataAnswer()
            if not is_empty(files):
                snapshot, notes = await self._pack_and_store(data, files, "clear", "", snapshot_id_of(command))
                add = self._records.add_last_snapshot
                await until_redis_answers(lambda: add(command.account, command.source, snapshot))
                answer = DataAnswer(snapshot, notes=notes)
            await run_in_thread(remove_folder, files)
        self._seen.pop(data.app_id, None)
        return answer

    # -- snapshots -------------------------------------------------------------------------------------------

    async def _make(self, data: AppData, account: str, reason: Reason, deploy: str, snapshot_id: str) -> DataAnswer:
        """Makes a snapshot, and removes those that it replaces."""
        await run_in_thread(data.note_snapshot, snapshot_id)
        snapshot, notes = await self._pack_and_store(data, data.files, reason, deploy, snapshot_id)
        await self._keep(account, data.app_id, snapshot)
        return DataAnswer(snapshot, notes=notes)

    async def _pack_and_store(
        self, data: AppData, files: Path, reason: Reason, deploy: str, snapshot_id: str
    ) -> tuple[Snapshot, list[str]]:
        async with self._packer.packed(data, files) as (packed, notes):
            return await self._store(data.app_id, packed, reason, deploy, snapshot_id), notes

    # -- what is due -----------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        present = await run_in_thread(list_data, self._folder)
        self._seen = {data.app_id: seen for data in present if (seen := self._seen.get(data.app_id)) is not None}
        for data in present:
            try:
                if data.exists:
                    await self._make_daily(data)
                await self._tidy_folder(data)
            except BackboneUnavailable:
                raise
            except Exception as error:  # one app must not stop the others
                logger.error("data.not_tidied", app=data.app_id, exc_info=error)
        await self._remove_expired()

    async def _make_daily(self, data: AppData) -> None:
        """Makes a snapshot a day after the last one, if something has changed."""
        if not data.is_daily_due(time.time()):  # without waiting for other work on the data
            return
        async with self._turns.exclusive(data.app_id, data.account):
            if await run_in_thread(data.needs_daily, time.time()):
                try:
                    await self._make(data, data.account, "daily", "", new_id("snp"))
                except (DataError, StorageUnavailable) as error:
                    logger.error("data.no_daily_snapshot", app=data.app_id, reason=str(error))
                    return
                await run_in_thread(data.note_daily, time.time())

    async def _tidy_folder(self, data: AppData) -> None:
        """Removes what nobody needs: the data of an app a week after its deletion, and what was set aside."""
        gone = data.folder / "gone"
        if not data.exists or await self._registry.find_app(data.app_id) is not None:
            gone.unlink(missing_ok=True)
        elif not gone.exists():
            gone.touch()
        elif time.time() - gone.stat().st_mtime > KEPT_AFTER_DELETION_SECONDS:
            async with self._turns.exclusive(data.app_id, data.account), stopped(data):
                await run_in_thread(data.remove)
        await run_in_thread(data.remove_leftovers)


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
