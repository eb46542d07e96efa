"""Decides which apps with data this host runs. One host without shared storage always runs all of them.

The rest of this page is about several hosts that serve from one storage.

A host runs such an app while it has the app's claim (`claims.py`) and holds its lease (`leases.py`). It copies the
data to the storage when they change (`copies.py`). When a host stops, it stops its apps, copies their data once more
and gives up the claims; then the next host fetches the copies and starts the apps. When a host dies, the next one has
what was copied last. Requests that arrive at another host are passed on (`neighbors.py`).

Failure policy: closed. A host that cannot renew its lease stops its apps before another host can take them over.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Protocol

import msgspec
import structlog

from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_canceled, run_in_thread
from gateway.deploys.states import Deploys, StaleDeploy
from gateway.errors import BackboneUnavailable, StorageUnavailable
from gateway.redis.client import until_redis_answers
from gateway.settings import Settings
from gateway.storage import open_storage
from workers.hosting.claims import Claim, Claims, StoredClaim, make_claim
from workers.hosting.copies import Copies, HeldClaim
from workers.hosting.data import AppData, DataHeld
from workers.hosting.data_packer import DataPacker
from workers.hosting.leases import LeaseLost, Leases
from workers.hosting.neighbors import Neighbors, find_own_address
from workers.hosting.packing import DataError
from workers.hosting.releases import Releases, Site
from workers.hosting.watchdog import AppState, is_running, read_state
from workers.sandbox import lease

logger = structlog.get_logger()

POLL_SECONDS = 0.2  # between reads of the claims
TURN_SECONDS = 3.0  # that a free claim is left to the host whose turn it is
CHECK_SECONDS = 2.0  # between looks whether an app's data have changed
EXISTS_SECONDS = 15.0  # between looks whether an app still exists
ORPHAN_SECONDS = 3_600.0  # after which the claim on a deleted app is removed
RETRY_SECONDS, LONGEST_RETRY_SECONDS, FETCH_RETRY_SECONDS = 1.0, 8.0, 3.0
ADDRESS_SECONDS = 5.0  # between looks for the own address, which is known once Caddy listens
STARTING_SECONDS = 30.0  # that requests may wait for an app that comes from another host
STOP_SECONDS = 12.0  # in which an app that is stopped must end
KILL_SECONDS = 2.0  # in which a keeper must kill an app that may no longer run
LEAVE_SECONDS = 40.0  # in which a host that stops gives up its claims


class Owner(Protocol):
    """Knows which start commands of live addresses run on this host."""

    is_alone: bool  # whether no other host can run them

    def runs(self, app_id: str) -> bool:
        """Returns whether this host runs the app."""

    def has_data(self, app_id: str) -> bool:
        """Returns whether this host has the newest data of the app, although the app may not run any longer."""

    def set_need(self, app_id: str, account: str, *, needed: bool) -> None:
        """Says whether the app's live address has a start command, which one host has to run."""

    def allow(self, app_id: str) -> None:
        """Allows the watchdog to start the app's live releases, if this host runs the app (`watchdog.py`)."""

    def pass_on(self, app_id: str) -> None:
        """Passes requests for the app on to the host that has its claim, unless this host has it."""

    async def run(self) -> None:
        """Runs until canceled."""

    async def leave(self) -> None:
        """Gives up all apps, if other hosts can take them. Called before this worker stops."""


class AlwaysOwner:
    """The owner on one host. It needs no Redis, so apps live on without it."""

    is_alone = True

    def runs(self, app_id: str) -> bool:
        return True

    has_data = runs

    def set_need(self, app_id: str, account: str, *, needed: bool) -> None: ...

    def allow(self, app_id: str) -> None: ...

    pass_on = allow

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def leave(self) -> None: ...


class Ownership:
    is_alone = False

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        releases: Releases,
        packer: DataPacker | None,
        repeat_step: Callable[[str], None],
        is_current: Callable[[], bool],
    ) -> None:
        """Without a `packer`, this host runs no apps.

        `repeat_step` applies the present step of an app's live address again, because the app came here or left.
        `is_current` tells whether this host serves what it should.
        """
        self._settings, self._registry, self._releases = settings, registry, releases
        self._deploys, self._repeat_step, self._is_current = Deploys(settings, registry), repeat_step, is_current
        self._host, self._address = releases.folder_id(), ""
        self._neighbors = Neighbors(releases.folder)
        self._leases = Leases(registry.store, releases.folder, self._host, lambda: self._address)
        self._claims, self._copies = Claims(registry.store), None
        if packer is not None:
            self._copies = Copies(open_storage(settings), self._claims, packer, settings.app_data_sync)
        self._needed: dict[str, str] = {}  # app → account
        self._held: dict[str, HeldClaim] = {}  # by app
        self._free_since: dict[str, float] = {}  # by app
        self._looked_at: dict[tuple[str, str], float] = {}  # the last look whether an account has an app
        self._missing_since: dict[tuple[str, str], float] = {}  # those that do not exist
        self._ending: dict[str, asyncio.Task[None]] = {}  # apps whose claims are lost, while they end
        self._is_leaving = False

    # -- what others ask and say -----------------------------------------------------------------------------

    def runs(self, app_id: str) -> bool:
        held = self._held.get(app_id)
        return held is not None and held.ready and self._leases.is_held()

    def has_data(self, app_id: str) -> bool:
        if app_id in self._needed:
            return self.runs(app_id)
        account = AppData(self._releases.folder, app_id).account
        stored = self._claims.find(account, app_id)
        return stored is not None and stored.claim.host == self._host

    def set_need(self, app_id: str, account: str, *, needed: bool) -> None:
        site = self._releases.live_site(app_id)
        if not needed:
            self._needed.pop(app_id, None)
            site.serve_here()
        elif self._needed.get(app_id) != account:
            self._needed[app_id] = account
            if not self.runs(app_id) and not lease.is_held(site.lease):
                self._neighbors.pass_on(site, "", "")

    # -- the lease -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        resumed = self._leases.resume()
        while True:
            if not resumed:
                await self._end_apps()
                self._leases.begin_session()
            resumed = False
            keeping, following = asyncio.create_task(self._leases.keep()), asyncio.create_task(self._follow_claims())
            try:
                await asyncio.wait([keeping, following], return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
                with suppress(LeaseLost):
                    keeping.result()
            finally:
                for task in (keeping, following):
                    task.cancel()
                await asyncio.gather(keeping, following, return_exceptions=True)
            logger.error("sites.lease_lost", action="apps with data start again when Redis answers")

    async def leave(self) -> None:
        if not self._leases.is_held():
            return
        alone = self._leases.list_present() == [self._host]
        self._is_leaving = True
        work = [asyncio.create_task(self._leave_one(held, alone=alone)) for held in self._held.values()]
        if work:
            await asyncio.wait(work, timeout=LEAVE_SECONDS)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        if not self._held and not alone:
            with suppress(BackboneUnavailable):
                await self._leases.end()

    async def _leave_one(self, held: HeldClaim, *, alone: bool) -> None:
        if held.task is not None:
            held.task.cancel()
            await asyncio.gather(held.task, return_exceptions=True)
        if not alone:
            await self._give_up(held)
        elif held.ready:  # the next worker continues, if it starts in time
            await self._copy(held, last=True)

    # -- claims ----------------------------------------------------------------------------------------------

    async def _follow_claims(self) -> None:
        read_at = float("-inf")
        while True:
            end_if_canceled()
            if time.monotonic() - read_at > ADDRESS_SECONDS:
                read_at = time.monotonic()
                self._address = await asyncio.to_thread(find_own_address, self._settings, self._releases.folder)
            with suppress(BackboneUnavailable):
                await self._claims.read_changes()
                for app_id in self._list_apps() - self._ending.keys():
                    await self._follow_safely(app_id)
                await self._remove_orphans()
                self._forget_unknown()
            await asyncio.sleep(POLL_SECONDS)

    async def _follow_safely(self, app_id: str) -> None:
        try:
            await self._follow(app_id)
        except BackboneUnavailable:
            raise
        except Exception as error:  # a damaged record must not affect the other apps
            logger.error("sites.app_not_followed", app=app_id, exc_info=error)

    def _list_apps(self) -> set[str]:
        apps = self._needed.keys() | self._held.keys()
        if self._is_current():  # before that, the apps that are needed are not known
            apps |= {stored.claim.app for stored in self._claims.list_all() if self._is_own(stored.claim)}
        return apps

    def _is_own(self, claim: Claim) -> bool:
        return claim.session != "" and (claim.host, claim.session) == (self._host, self._leases.session)

    async def _follow(self, app_id: str) -> None:
        """Takes or leaves an app as its claim says. Raises BackboneUnavailable."""
        held, account = self._held.get(app_id), self._needed.get(app_id)
        stored = self._find_claim(app_id)
        if held is not None and not held.refresh(stored):
            return self._lose(held)
        if not self._is_free(stored):
            self._free_since.pop(app_id, None)
        if held is None and self._copies is not None and not self._is_leaving and self._leases.session:
            if stored is not None and self._is_own(stored.claim):  # the worker before this one had it
                self._hold(stored)
            elif account is not None and self._is_free(stored) and self._is_own_turn(app_id, stored):
                await self._claim(app_id, account, stored)
        self.pass_on(app_id)

    def _find_claim(self, app_id: str) -> StoredClaim | None:
        """Finds the claim on an app of the account that needs it, or whose claim this host has."""
        if app_id in self._held:
            return self._claims.find(self._held[app_id].claim.account, app_id)
        if app_id in self._needed:
            return self._claims.find(self._needed[app_id], app_id)
        return next((each for each in self._claims.list_all() if each.claim.app == app_id), None)

    def pass_on(self, app_id: str) -> None:
        if app_id in self._held or app_id not in self._needed:
            return
        stored, host, address = self._find_claim(app_id), "", ""
        if stored is not None and stored.claim.host != self._host:
            host = stored.claim.host
            address = self._leases.find_address(host, stored.claim.session)
        self._neighbors.pass_on(self._releases.live_site(app_id), host, address)

    def _is_free(self, stored: StoredClaim | None) -> bool:
        if stored is None or not stored.claim.session:
            return True
        return self._leases.has_ended(stored.claim.host, stored.claim.session)

    def _is_own_turn(self, app_id: str, stored: StoredClaim | None) -> bool:
        """Decides which host takes a free claim first: the one that had it last, or else one by the app's id."""
        now, present = time.monotonic(), self._leases.list_present()
        last = stored.claim.host if stored is not None else ""
        if not self._is_current() or not self._leases.is_steady():
            return False
        if now - self._free_since.setdefault(app_id, now) > TURN_SECONDS:
            return True
        if last in present:
            return last == self._host
        return self._host == max(present, key=lambda host: blake2b(f"{host} {app_id}".encode()).digest())

    async def _claim(self, app_id: str, account: str, stored: StoredClaim | None) -> None:
        """Claims the app for this host, if it still exists. Raises BackboneUnavailable."""
        if not await self._exists(account, app_id):
            return
        session = self._leases.session
        claim = make_claim(account, app_id, self._host, session, stored.claim if stored else None)
        if session and await self._claims.replace(stored, claim):
            logger.info("sites.app_claimed", app=app_id, fence=claim.fence, died=claim.died)
            self._hold(self._claims.require(claim))

    async def _exists(self, account: str, app_id: str) -> bool:
        """Returns whether the account has the app. Looks only once in a while. Raises BackboneUnavailable."""
        key, now = (account, app_id), time.monotonic()
        if now - self._looked_at.get(key, float("-inf")) > EXISTS_SECONDS:
            app = await self._registry.find_app(app_id)
            self._looked_at[key] = now
            if app is not None and app.account == account:
                self._missing_since.pop(key, None)
            else:
                self._missing_since.setdefault(key, now)
        return key not in self._missing_since

    async def _remove_orphans(self) -> None:
        """Removes the claims on apps that were deleted long ago, and the copies of their data."""
        for stored in self._claims.list_all():
            claim, key = stored.claim, (stored.claim.account, stored.claim.app)
            if claim.app in self._held or not self._is_free(stored) or await self._exists(*key):
                continue
            if time.monotonic() - self._missing_since[key] > ORPHAN_SECONDS and self._copies is not None:
                with suppress(StorageUnavailable):
                    await self._copies.remove_all(claim)
                    await self._claims.remove(stored)

    def _forget_unknown(self) -> None:
        """Forgets what was found about apps that no host runs and this host does not need."""
        known = {(stored.claim.account, stored.claim.app) for stored in self._claims.list_all()}
        known |= {(account, app_id) for app_id, account in self._needed.items()}
        for key in self._looked_at.keys() - known:
            del self._looked_at[key]
            self._missing_since.pop(key, None)
        for app_id in self._free_since.keys() - {app_id for _, app_id in known}:
            del self._free_since[app_id]

    # -- an app of this host ---------------------------------------------------------------------------------

    def _hold(self, stored: StoredClaim) -> None:
        app_id, held = stored.claim.app, HeldClaim(stored)
        self._free_since.pop(app_id, None)
        self._held[app_id] = held
        held.task = asyncio.create_task(self._keep_or_try_again(held))

    async def _keep_or_try_again(self, held: HeldClaim) -> None:
        try:
            await self._keep(held)
        except Exception as error:  # a bug, or a full disk
            logger.error("sites.app_not_kept", app=held.claim.app, exc_info=error)
            await asyncio.sleep(EXISTS_SECONDS)
            self._held.pop(held.claim.app, None)  # this host still has the claim, and so tries again

    async def _keep(self, held: HeldClaim) -> None:
        """Fetches the data, runs the app, and copies its data, until the app needs no host any more."""
        claim, app_id = held.claim, held.claim.app
        site = self._releases.live_site(app_id)
        try:
            site.expect_start()
            site.serve_here()
            await self._fetch(held)
            held.ready = True
            self._repeat_step(app_id)  # starts the app
            if not await self._has_started(site):
                logger.warning("sites.app_starts_slowly", app=app_id)
        finally:
            site.end_start()
        while self._needed.get(app_id) == claim.account:
            if not await until_redis_answers(lambda: self._exists(claim.account, app_id)):
                self._needed.pop(app_id)
                break
            await asyncio.sleep(CHECK_SECONDS)
            await self._copy(held)
        await self._give_up(held)

    async def _fetch(self, held: HeldClaim) -> None:
        """Makes the data of this host the newest ones. Records the time of a copy whose host has died."""
        claim = held.claim
        assert self._copies is not None
        while True:
            try:
                fetched = await self._copies.fetch(held, self._data(claim.app))
                break
            except (StorageUnavailable, DataError, DataHeld) as error:
                logger.error("sites.data_not_fetched", app=claim.app, error=str(error))
                await asyncio.sleep(FETCH_RETRY_SECONDS)
        if fetched and claim.died and claim.copy is not None:
            at = claim.copy.at
            with suppress(StaleDeploy):
                await until_redis_answers(lambda: self._deploys.record_data_time(claim.account, claim.app, at))

    async def _copy(self, held: HeldClaim, *, last: bool = False) -> bool:
        """Copies the data if that is due. Returns False if it has failed, and is to be repeated."""
        assert self._copies is not None
        try:
            return await self._copies.update(held, self._data(held.claim.app), last=last)
        except (BackboneUnavailable, StorageUnavailable, DataError) as error:
            logger.warning("sites.data_not_copied", app=held.claim.app, error=str(error))
            return False

    async def _give_up(self, held: HeldClaim) -> None:
        """Stops the app, copies its data, and gives up the claim. Keeps the claim until the data are copied."""
        app_id, site = held.claim.app, self._releases.live_site(held.claim.app)
        if app_id in self._needed:
            self._neighbors.pass_on(site, "", "")
        held.ready = False
        self._repeat_step(app_id)
        await self._stop(site)
        pause = RETRY_SECONDS
        while not await self._copy(held, last=True):
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)
        await until_redis_answers(
            lambda: self._claims.replace(held.stored, msgspec.structs.replace(held.claim, session=""))
        )
        self._held.pop(app_id, None)
        logger.info("sites.app_left", app=app_id, fence=held.claim.fence)

    def _lose(self, held: HeldClaim) -> None:
        """Ends an app at once whose claim belongs to another host, or was removed."""
        app_id, site = held.claim.app, self._releases.live_site(held.claim.app)
        held.ready = False
        if app_id in self._needed:
            self._neighbors.pass_on(site, "", "")
        site.forbid()
        logger.error("sites.claim_lost", app=app_id, fence=held.claim.fence)

        async def end() -> None:
            await self._drop(held)
            await self._stop(site)

        self._ending[app_id] = task = asyncio.create_task(end())
        task.add_done_callback(lambda _: self._ending.pop(app_id))

    async def _drop(self, held: HeldClaim) -> None:
        self._held.pop(held.claim.app, None)
        held.ready = False
        if held.task is not None:
            held.task.cancel()
            await asyncio.gather(held.task, return_exceptions=True)
        self._repeat_step(held.claim.app)

    def _data(self, app_id: str) -> AppData:
        return AppData(self._releases.folder, app_id)

    # -- processes -------------------------------------------------------------------------------------------

    def allow(self, app_id: str) -> None:
        site = self._releases.live_site(app_id)
        if self.runs(app_id):
            site.allow(self._leases.path)

    async def _has_started(self, site: Site) -> bool:
        """Waits until the app has started. Returns False if that takes long."""
        ends = time.monotonic() + STARTING_SECONDS
        while site.current:
            state = read_state(self._releases.folder, site.current)
            if state.asleep or is_running(state.keeper, state.began):
                return True
            if time.monotonic() > ends:
                return False
            await asyncio.sleep(POLL_SECONDS / 4)
        return True

    def _list_running(self, site: Site) -> list[str]:
        """Lists the deploys whose start commands the watchdog runs."""
        running = self._releases.releases_to_run()
        return [deploy_id for deploy_id, release in running.items() if release.parent == site.folder]

    async def _stop(self, site: Site) -> None:
        """Stops the app, and waits for the end of its processes. It may not start again."""
        names = self._list_running(site)
        states = [read_state(self._releases.folder, name) for name in names]
        for name in names:
            self._releases.stop_soon(name)
        ended = await _until_ended(states, STOP_SECONDS)
        site.forbid()
        while not ended:
            ended = await _until_ended(states, KILL_SECONDS)
            for state in states:
                if is_running(state.keeper, state.began):
                    with suppress(ProcessLookupError):
                        os.kill(state.keeper, signal.SIGKILL)  # the kernel kills its command
        while not await run_in_thread(_is_stopped, self._data(site.app_id)):  # noqa: ASYNC110
            await asyncio.sleep(RETRY_SECONDS)

    async def _end_apps(self) -> None:
        """Ends all apps with data of this host, because its lease has ended."""
        sites = [site for site in self._releases.sites() if not site.is_preview]
        running = [site for site in sites if self._list_running(site)]
        for site in running:
            self._neighbors.pass_on(site, "", "")
        for site in sites:
            site.forbid()
        for held in [*self._held.values()]:
            await self._drop(held)
        await asyncio.gather(*map(self._stop, running))


def _is_stopped(data: AppData) -> bool:
    """Waits until no keeper has the data open, also one that was just starting. Returns False after a while."""
    if data.folder.is_dir():
        try:
            with data.stopped():
                pass
        except TimeoutError:
            return False
    return True


async def _until_ended(states: list[AppState], seconds: float) -> bool:
    """Waits until the keepers have ended. Returns False if one is left."""
    ends = time.monotonic() + seconds
    while any(is_running(state.keeper, state.began) for state in states):
        if time.monotonic() > ends:
            return False
        await asyncio.sleep(POLL_SECONDS / 4)
    return True
