"""The data of the apps on this host, in its data folder (`workers/engine/app_data.py`).

With a shared storage, the data may move: the newest snapshot is where the next host, or a cluster, goes on. Each host
notes which snapshots its files were made from. So one that served before, and finds a newer snapshot, takes that
instead of its own files. A clean stop of the worker makes a last snapshot of each app.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import structlog

from gateway.accounts.records import SLUG
from gateway.accounts.registry import Registry
from gateway.cancellation import RunningTasks, cancel, run_in_thread
from gateway.data.records import DataState, DataStatus, Reason, Snapshot
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.ids import new_id
from gateway.redis.client import patient
from gateway.settings import Settings
from workers.engine.app_data import FOLDER, AppData, is_empty, is_long_gone, list_data
from workers.engine.daily import DailySnapshots
from workers.engine.data import DataDriver, describe_status
from workers.engine.data_keeper import DataKeeper, Keeper, Packed
from workers.engine.packing import DataError, SandboxPacker
from workers.engine.replacements import Replacements
from workers.hosting.releases import Releases, Site
from workers.hosting.watchdog import is_running, read_state
from workers.sandbox.sandbox import MIB, Sandbox

logger = structlog.get_logger()

REPORT_SECONDS = 0.5  # between reports of what has changed
REPORT_ALL_SECONDS = 3_600.0  # between reports of everything, because reports expire
PLANS_SECONDS = 5.0  # between looks at the plans of accounts
LEAVE_SECONDS = 40.0  # in which a worker that stops makes its last snapshots


class HostData(DataDriver):
    def __init__(self, settings: Settings, registry: Registry, sandbox: Sandbox) -> None:
        super().__init__(settings, registry)
        self.report_seconds = REPORT_SECONDS
        self._packer, self._may_move = SandboxPacker(sandbox), bool(settings.storage_url)
        self._seen: dict[str, tuple[object, ...]] = {}  # by app: what its last report was made from

    def _data(self, app_id: str) -> AppData:
        return AppData(self._folder, app_id)

    def _site(self, app_id: str) -> Site:
        return Site(self._folder / "releases" / app_id / "live")

    def _list_present(self) -> list[AppData]:
        return [data for data in list_data(self._folder) if data.exists]

    @asynccontextmanager
    async def reach(self, app_id: str, account: str, *, create: bool = False) -> AsyncIterator[Keeper | None]:
        data = self._data(app_id)
        app = await patient(self._registry).find_app(app_id) if create else None
        if app is not None and app.account == account:
            limit = await self.find_limit(account)
            await run_in_thread(data.prepare, account, limit)
            data.limit = limit
        if data.account != account:
            yield None
            return
        keeper = DataKeeper(data, self._packer)
        await self.bring_newest(keeper, app_id, account)
        yield keeper

    def find_due(self, app_id: str, account: str) -> Keeper | None:
        data = self._data(app_id)
        is_due = data.exists and not data.is_stale and DailySnapshots(data).is_due(time.time())
        return DataKeeper(data, self._packer) if is_due else None

    @asynccontextmanager
    async def forget(self, app_id: str, account: str) -> AsyncIterator[Packed | None]:
        data, site = self._data(app_id), self._site(app_id)
        if not data.folder.is_dir():
            yield None
            return
        if site.account == account and site.current is not None:
            Releases(self._folder).stop(site.current)
        async with DataKeeper(data, self._packer).forget(account) as packed:
            yield packed
        self._seen.pop(app_id, None)

    async def keep(
        self, account: str, app_id: str, packed: Packed, reason: Reason, deploy: str, snapshot_id: str
    ) -> Snapshot:
        await run_in_thread(self._data(app_id).note_snapshot, snapshot_id)
        return await super().keep(account, app_id, packed, reason, deploy, snapshot_id)

    def list_rounds(self, running: RunningTasks) -> Sequence[tuple[float, Callable[[], Awaitable[None]]]]:
        return ((PLANS_SECONDS, self._apply_plans),)

    # -- limits and reports ----------------------------------------------------------------------------------

    async def _apply_plans(self) -> None:
        """Sets the limits by the accounts' plans. While Redis is unavailable, the last ones apply."""
        await self._set_limits(await run_in_thread(self._list_present))

    async def _set_limits(self, apps: Collection[AppData]) -> None:
        owned = {data.app_id: data for data in apps}
        for app_id, (app, account) in (await self._registry.read_intact_apps([*owned]))[0].items():
            if app.account == owned[app_id].account:
                owned[app_id].limit = self._settings.app_data[account.plan] * MIB

    async def find_changes(self) -> dict[tuple[str, str], DataStatus]:
        changed = await run_in_thread(self._find_changes)
        await self._set_limits([data for data, _, _ in changed if data.app_id not in self._seen])
        self._seen |= {data.app_id: seen for data, _, seen in changed}
        return {(data.account, data.app_id): status for data, status, _ in changed}

    def _find_changes(self) -> list[tuple[AppData, DataStatus, tuple[object, ...]]]:
        """Returns the apps to report. Compares only times, because most apps of a host may sleep."""
        changed: list[tuple[AppData, DataStatus, tuple[object, ...]]] = []
        top, due = self._folder / FOLDER, time.monotonic() // REPORT_ALL_SECONDS
        for name in os.listdir(top) if top.is_dir() else ():
            seen = (due, *self._read_times(f"{top}/{name}", name))
            if self._seen.get(name) == seen or not SLUG.fullmatch(name):
                continue
            data = self._data(name)
            if data.exists:
                state = self._find_state(data)  # before the size, which the keeper may write meanwhile
                changed.append((data, describe_status(data.used, data.limit or 0, state), seen))
        return changed

    def _read_times(self, folder: str, app_id: str) -> tuple[object, ...]:
        """Returns the times of the last changes of what a report is made from."""
        current, changed, stated = "", 0, 0
        with contextlib.suppress(OSError):
            changed = os.stat(folder).st_mtime_ns  # the files in it are replaced, never changed
            current = os.readlink(f"{self._folder}/releases/{app_id}/live/current")
            stated = os.stat(f"{self._folder}/running/{current}.state").st_mtime_ns
        return changed, current, stated

    def _find_state(self, data: AppData) -> DataState:
        site = self._site(data.app_id)
        if data.is_held:
            return "restoring"
        if site.current is None or not (site.release(site.current) / "start").exists():
            return "none"
        if data.is_full:
            return "full"
        return "asleep" if read_state(self._folder, site.current).asleep else "running"

    async def has_started(self, app_id: str, account: str) -> bool:
        return await run_in_thread(self._has_started, app_id)

    def _has_started(self, app_id: str) -> bool:
        if self._find_state(self._data(app_id)) != "running" or (current := self._site(app_id).current) is None:
            return True
        state = read_state(self._folder, current)
        return is_running(state.keeper, state.began) and os.path.exists(state.socket)

    # -- what is no longer needed ----------------------------------------------------------------------------

    async def list_apps(self) -> list[tuple[str, str]]:
        present = await run_in_thread(list_data, self._folder)
        self._seen = {data.app_id: seen for data in present if (seen := self._seen.get(data.app_id)) is not None}
        return [(data.app_id, data.account) for data in present]

    async def tidy(self, app_id: str, account: str, *, is_deleted: bool) -> None:
        """Removes the data of an app a week after its deletion, and what was set aside."""
        data = self._data(app_id)
        if is_long_gone(data.folder / "gone", is_deleted=data.exists and is_deleted):
            async with self.exclusive(app_id, account):
                await DataKeeper(data, self._packer).remove()
        await run_in_thread(data.remove_leftovers)

    # -- from and to other engines ---------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Ends what was interrupted, and marks the files that are older than elsewhere. Before any app runs.

        While Redis is unavailable, all files count as the newest ones.
        """
        for data in await run_in_thread(list_data, self._folder):
            await run_in_thread(Replacements(data).recover)
            self._site(data.app_id).unmark_stopped()  # the watchdog marks it again
        if self._may_move:
            with contextlib.suppress(BackboneUnavailable):
                await self._mark_stale()

    async def _mark_stale(self) -> None:
        """Raises BackboneUnavailable."""
        apps = await run_in_thread(self._list_to_run)
        newest = await self.records.find_newest([(account, app_id) for app_id, account in apps.items()])
        for (app_id, account), snapshot_id in zip(apps.items(), newest, strict=True):
            data = self._data(app_id)
            if snapshot_id and not data.comes_from(snapshot_id):
                await run_in_thread(self._prepare_stale, data, account, self._settings.app_data["free"] * MIB)
                logger.info("data.stale", app=app_id, newest=snapshot_id)
            elif snapshot_id:
                data.note_snapshot(snapshot_id)

    def _prepare_stale(self, data: AppData, account: str, limit: int) -> None:
        data.prepare(account, limit)
        data.mark_stale()

    def _list_to_run(self) -> dict[str, str]:
        """Returns the apps with data or a start command here, with their accounts."""
        sites = (Site(release.parent) for release in Releases(self._folder).releases_to_run().values())
        apps = {site.app_id: site.account for site in sites if not site.is_preview}
        return apps | {data.app_id: data.account for data in self._list_present()}

    async def bring(self, account: str, app_id: str) -> None:
        """Brings an app's newest snapshot here if this host has no files of it, or older ones. It does not run yet.

        Raises DataError and StorageUnavailable.
        """
        data = self._data(app_id)
        if self._may_move and not (data.exists and data.account == account and not data.is_stale):
            await self.fetch_newest(account, app_id)

    async def fetch_newest(self, account: str, app_id: str) -> None:
        """Replaces the data by their newest snapshot, if there is one. Until that has succeeded, the app does not run.

        Raises DataError and StorageUnavailable.
        """
        data = self._data(app_id)
        async with self.exclusive(app_id, account):
            [newest] = await patient(self.records).find_newest([(account, app_id)])
            if newest:
                await run_in_thread(self._prepare_stale, data, account, await self.find_limit(account))
            await self.bring_newest(DataKeeper(data, self._packer), app_id, account)

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
        await cancel(*late)

    async def _make_last(self, data: AppData) -> None:
        account, app_id = data.account, data.app_id
        try:
            async with self.exclusive(app_id, account):
                app = await self._registry.find_app(app_id)
                [newest] = await self.records.find_newest([(account, app_id)])
                if app is None or app.account != account or (not newest and is_empty(data.files)):
                    return
                fingerprint = await run_in_thread(data.fingerprint)
                if not data.is_as_stopped(newest, fingerprint):
                    snapshot_id = new_id("snp")
                    async with self._packer.packed(data, data.files) as (archive, notes):
                        await self.keep(account, app_id, Packed(archive, notes), "stop", "", snapshot_id)
                    data.note_stop(snapshot_id, fingerprint)
        except (BackboneUnavailable, StorageUnavailable, DataError, OSError) as error:
            logger.error("data.not_kept", app=app_id, reason=str(error))
