"""What a release is served with: the files and processes of a host (`workers/hosting/driver.py`), or the objects of a
cluster (`workers/kubernetes/driver.py`).

A driver does what it is told. What is done when, and what is undone after a fault, `steps.py` decides for both. Both
keep one contract (`tests/workers/engine/test_driver_contract.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Set
from typing import Protocol, TypeAlias

import msgspec

from gateway.accounts.records import App
from gateway.deploys.addresses import host_of
from gateway.deploys.release import Release
from gateway.deploys.serving import Wanted
from gateway.deploys.states import DeployError, StorageFailed
from gateway.errors import StorageUnavailable
from gateway.storage import until_storage_answers

Hosts = Mapping[str, str]  # each host name, with the one to which its visitors are redirected, or ''


class Target(msgspec.Struct, frozen=True):
    """A release at an address of an app, and the step of its record."""

    wanted: Wanted
    app: App
    deploy: str  # the id of the deploy that made the release
    output: list[str]  # receives lines of the start command, for the deploy's log

    @property
    def is_new(self) -> bool:
        """Whether the release has not passed its checks."""
        return self.wanted.step in ("check", "canary") and self.deploy == self.wanted.deploy

    @property
    def release(self) -> Release:
        """The record of the release. That of an `undo` does not have its own any more: then one like most others."""
        return self.wanted.releases.get(self.deploy, Release("", 0, runs=True))

    def host(self, domain: str) -> str:
        """Returns the service's own host name of the address."""
        return host_of(self.app, self.wanted.address, domain)


class Place(msgspec.Struct, frozen=True):
    """An address of an app where visitors get a release, and the host names that lead there (`Hosts`)."""

    account: str
    app: str  # id
    address: str
    hosts: Hosts = {}


# When previews were last visited, in Unix time, by account, app and address.
Visits: TypeAlias = dict[tuple[str, str, str], float]


class ReleaseMissing(DeployError):
    """A release is neither where it is served nor in the storage."""

    def __init__(self, deploy: str) -> None:
        super().__init__(f"the release of {deploy} is no longer kept; deploy its source again")


class NotStopped(DeployError):
    """A release that must not run beside the next one goes on running."""

    def __init__(self) -> None:
        super().__init__("the release that it replaces could not be stopped; deploy again", service_fault=True)


class Places(Protocol):
    """Where visitors get releases, and the host names that lead there. Methods that wait may raise DeployError."""

    async def list_apps(self) -> set[str]:
        """Returns the ids of the apps of which something is there."""

    async def list_places(self, *app_ids: str) -> list[Place]:
        """Returns the places of these apps."""

    def places_at(self, host: str) -> list[Place]:
        """Returns the places to which a host name leads. They lack their other names."""

    async def rename(self, place: Place, hosts: Hosts) -> None:
        """Lets these host names lead to the place, and no others."""

    async def leave(self, place: Place) -> None:
        """Gives nobody the release of an app that is deleted, or belongs to another account."""


class Driver(Protocol):
    """Every method can be repeated. Those that wait may raise DeployError."""

    outage: asyncio.Event  # set while no release can be fetched
    return_seconds: float  # in which a release that is served again should answer

    @property
    def places(self) -> Places: ...

    # -- a release -------------------------------------------------------------------------------------------

    async def prepare(self, target: Target) -> None:
        """Makes room for the address. Every step begins with this."""

    async def place(self, target: Target) -> None:
        """Gets the release, unless it is there."""

    async def start(self, target: Target) -> None:
        """Runs the release. An app that sleeps stays asleep."""

    async def until_answers(self, target: Target) -> None:
        """Waits until the release is up (`health.py`), and could be routed to. Ends as soon as it can't."""

    async def read_output(self, target: Target) -> list[str]:
        """Returns the last lines that the start command has written."""

    async def hold(self, target: Target, former: str) -> None:
        """Lets the visitors of the release `former` wait, until the address is routed to one that runs."""

    async def stop(self, target: Target, former: str) -> None:
        """Stops the release `former` at this address. Returns when nothing of it runs."""

    async def remove(self, target: Target) -> None:
        """Stops the release, and removes it."""

    async def end(self, target: Target) -> None:
        """Gives visitors nothing at this address any more, and removes all its releases."""

    async def retire(self, target: Target, others: Collection[str]) -> None:
        """Confirms the release that visitors get, stops the others, and removes those that are not kept."""

    def list_others(self, target: Target) -> list[str]:
        """Returns the other releases at this address that run."""

    def find_former(self, target: Target) -> str:
        """Returns the release that visitors should get again when this one is undone; '' for none."""

    def runs(self, deploy: str) -> bool:
        """Returns whether a release has been started, and not stopped since."""

    def excludes(self, target: Target, former: str) -> bool:
        """Returns whether `former` runs, and must not run beside this release: they work with the same data."""

    def gives_way(self, wanted: Wanted) -> bool:
        """Returns whether the release that visitors get must not run now, because the next one does."""

    def is_suspended(self, target: Target) -> bool:
        """Returns whether nothing of the app runs, because its account or the app is suspended."""

    # -- visitors --------------------------------------------------------------------------------------------

    def routed(self, wanted: Wanted) -> str:
        """Returns the release that visitors of the address get; '' for none."""

    async def route(self, target: Target, hosts: Hosts | None) -> None:
        """Gives visitors the release, at these host names as well, and lets nobody wait any more.

        With None, its host names stay as they are.
        """

    async def unroute(self, target: Target) -> None:
        """Gives visitors no release."""

    async def visit(self, target: Target) -> None:
        """Requests what shows that the release is up, as visitors do."""

    def count_exits(self, target: Target) -> int:
        """Returns how often the start command has ended by itself."""

    # -- afterwards ------------------------------------------------------------------------------------------

    def lacks(self, wanted: Wanted) -> bool:
        """Returns whether the release that visitors should get is not here."""

    def note(self, wanted: Wanted) -> None:
        """Takes note of a new record, before its step is applied."""

    async def read_visits(self) -> Visits:
        """Returns the previews that were visited since the last call, with the Unix time. They lack their names."""

    async def tidy(self, gone: Set[str], deploys: Set[str]) -> None:
        """Removes what is no longer needed.

        `gone`: the ids of the deleted apps. `deploys`: those of the deploys to keep. The sets change while this runs.
        """


async def until_stored(outage: asyncio.Event, deploy: str, look: Callable[[], Awaitable[bool]]) -> None:
    """Looks for a release in the storage until that answers. Sets `outage` meanwhile. Raises DeployError."""

    async def try_to_look() -> bool:
        try:
            found = await look()
        except StorageUnavailable:
            outage.set()
            raise
        outage.clear()
        return found

    try:
        if not await until_storage_answers(try_to_look):
            raise ReleaseMissing(deploy)
    except StorageUnavailable as error:
        raise StorageFailed(error) from None
