"""Which host names lead to which address of which app: those of its record now, unless another app has them.

An app is renamed, gets a domain, moves to another account and is deleted elsewhere. Each change is announced, and what
is announced while nobody listens is found in rounds over all apps.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NoReturn, TypeAlias

import msgspec
import structlog

from gateway.accounts.records import App, Domain, replace_domains
from gateway.accounts.registry import Registry
from gateway.cancellation import end_if_canceled, run_in_background
from gateway.deploys.addresses import host, hosts_of
from gateway.deploys.states import AppGone, DeployError
from gateway.errors import BackboneUnavailable
from gateway.keys import ALIAS, APP, PARTITION_TAGS, apps_key, served_apps_key
from gateway.redis.client import Store, patient
from gateway.redis.listener import Listener
from gateway.redis.scripts import CHANGES_CHANNEL
from gateway.settings import Plan
from workers.engine.driver import Hosts, Place, Places, Target

logger = structlog.get_logger()

ROUNDS = 4  # of tidying, in which the names of all apps are looked at, unless `MAX_SLICE` requires more rounds
MAX_SLICE = 250  # apps of a round, so that thousands of apps cost no more than these


# Returns the record of an app by its id or name.
FindApp: TypeAlias = Callable[[str], Awaitable[App | None]]
# Reads many apps together, by id. One that is just being renamed may be missing.
FindApps: TypeAlias = Callable[[Sequence[str]], Awaitable[dict[str, App]]]


class Names:
    def __init__(self, places: Places, find_app: FindApp, find_apps: FindApps, domain: str) -> None:
        """`domain`: of the apps, without a port."""
        self._places, self._find_app, self._find_apps, self._domain = places, find_app, find_apps, domain
        self.lock = asyncio.Lock()  # held while names are given and taken
        self._left: list[str] = []  # the apps that are still to be followed in this turn
        self._slice = 0  # how many of them in a round
        self.gone: set[str] = set()  # the ids of deleted apps of which something is there

    @asynccontextmanager
    async def reserved(self, target: Target) -> AsyncIterator[Hosts]:
        """Yields the host names of an address, which nobody else gets meanwhile.

        Raises DeployError if one is another app's.
        """
        async with self.lock:
            wanted = target.wanted
            # Another account may have taken the app's name since the deploy began.
            app = await self._find_app(wanted.app)
            if app is None or app.account != wanted.account:
                raise AppGone
            hosts = self._hosts(app, wanted.address)
            for name in hosts:
                if await self._is_taken(name, app, wanted.address):
                    raise DeployError(f"the address {name} belongs to another app; rename one of the two")
            yield hosts

    async def _is_taken(self, name: str, app: App, address: str) -> bool:
        """Returns whether another app is served at the host name, or has it as its own name."""
        for place in self._places.places_at(name):
            owner = await self._find_app(place.app) if place.app != app.id else None
            if owner is not None and owner.account == place.account and name in self._hosts(owner, place.address):
                return True
        namesake = await self._find_app(name.partition(".")[0]) if address != "live" else None
        return namesake is not None and namesake.id != app.id

    def _hosts(self, app: App, address: str) -> Hosts:
        return hosts_of(app, address, self._domain)

    # -- following the apps' records -------------------------------------------------------------------------

    async def follow_app(self, name: str) -> None:
        """Serves the app with this name or id, and one that had the name before, at their present addresses."""
        app = await self._find_app(name)
        ids = {app.id} if app is not None else {name}
        ids |= {place.app for place in self._places.places_at(host(name, "live", None, self._domain))}
        for app_id in ids:
            await self._follow(app_id)

    async def follow_some(self) -> None:
        """Serves a part of the apps at their present addresses."""
        if not self._left:
            self._left = sorted(await self._places.list_apps())
            self._slice = min(math.ceil(len(self._left) / ROUNDS), MAX_SLICE)
            self.gone &= {*self._left}
        some, self._left = self._left[: self._slice], self._left[self._slice :]
        apps, places = await self._find_apps(some), defaultdict[str, list[Place]](list)
        for place in await self._places.list_places(*some):
            places[place.app].append(place)
        for app_id in some:
            if app_id in apps and self._is_followed(apps[app_id], places[app_id]):
                continue
            try:
                await self._follow(app_id)
            except msgspec.MsgspecError as error:  # one damaged record must not affect the others
                logger.error("app.unreadable", app=app_id, error=str(error))
            except DeployError as error:
                logger.error("sites.app_not_followed", app=app_id, reason=str(error))

    def _is_followed(self, app: App, places: Collection[Place]) -> bool:
        """Returns whether an app is served as its record says."""
        return (
            app.id not in self.gone
            and any(place.address == "live" for place in places)
            and all((place.account, place.hosts) == (app.account, self._hosts(app, place.address)) for place in places)
        )

    async def _follow(self, app_id: str) -> None:
        async with self.lock:
            app, places = await self._find_app(app_id), await self._places.list_places(app_id)
            (self.gone.add if app is None else self.gone.discard)(app_id)
            if app is not None and all(place.address != "live" for place in places):
                places = [*places, Place(app.account, app.id, "live")]  # it was never live
            for place in places:
                if app is None or app.account != place.account:
                    await self._places.leave(place)
                elif place.hosts != (hosts := self._hosts(app, place.address)):
                    free = {name for name in hosts if not await self._is_taken(name, app, place.address)}
                    led = {name: to if to in free else "" for name, to in hosts.items() if name in free}
                    await self._places.rename(place, led)


async def find_app(registry: Registry, app: str) -> App | None:
    """Returns the app. Waits for Redis if necessary. An app does not get a domain that another app claimed first."""
    found = await patient(registry).find_app(app)
    if found is None:
        return None
    return _without_lost(found, await patient(registry.domains).list_lost([found]))


async def find_apps(registry: Registry, app_ids: Sequence[str]) -> dict[str, App]:
    """Like `find_app`, for many apps together. One that is just being renamed may be missing."""
    found, _ = await patient(registry).read_intact_apps(app_ids)
    apps = [app for app, _ in found.values()]
    lost = await patient(registry.domains).list_lost(apps)
    return {app.id: _without_lost(app, lost) for app in apps}


def _without_lost(app: App, lost: Collection[tuple[str, str]]) -> App:
    domains = [Domain(each.name) if (app.id, each.name) in lost else each for each in app.domains]
    return replace_domains(app, domains) if domains != [*app.domains] else app


async def find_plan(registry: Registry, account_id: str) -> Plan:
    """Returns the plan of an account, or the smallest one if there is no such account. Waits for Redis if necessary."""
    account = await patient(registry).account(account_id)
    return "free" if account is None else account.plan


async def list_apps(store: Store) -> set[str]:
    """Returns the ids of all apps, or of none while Redis is unavailable."""
    with suppress(BackboneUnavailable):
        pages = await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.zrange(apps_key(tag), 0, -1))
        return {app_id for page in pages for app_id in page}
    return set()


async def follow_changes(
    store: Store,
    *followers: Callable[[str], Awaitable[None]],
    first: Collection[str] = (),
    on_step: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Calls the followers with the id or name of an app whose record has changed: its name, domain or account.

    Begins with the apps in `first`. What is announced while there is no subscription, `Names.follow_some` finds. Calls
    `on_step` when a serving record has changed.
    """
    changed, woken, served = {*first}, asyncio.Event(), {served_apps_key(tag) for tag in PARTITION_TAGS}
    woken.set()

    def note(_: str, key: str) -> None:
        if key in served:
            on_step()
        prefix, _, name = key.partition(":")
        if prefix in (APP, ALIAS):
            changed.add(name)
            woken.set()

    listener = Listener(store, CHANGES_CHANNEL, on_message=note, loss_event="sites.changes_lost")
    async with run_in_background(listener.run()):
        while True:
            end_if_canceled()
            await woken.wait()
            woken.clear()
            while changed:
                name = changed.pop()
                try:
                    for follow in followers:
                        await follow(name)
                except Exception as error:  # a damaged record or a full disk must not affect the other apps
                    logger.error("sites.app_not_followed", app=name, exc_info=error)
