"""The interface between the records of what is served, and what serves it.

`host_agent.py` follows the records and answers them. It knows no folders, processes or servers. `serving.py` serves
from a host's data folder, and `workers/kubernetes/applier.py` from a cluster. Both keep one contract
(`test_applier_contract.py`).
"""

import asyncio
from collections.abc import Set
from typing import Protocol

import msgspec

from gateway.accounts.records import App
from gateway.deploys.serving import Wanted
from gateway.deploys.states import DeployError


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


class ReleaseMissing(DeployError):
    """A release is neither on this host nor in the storage."""

    def __init__(self, deploy: str) -> None:
        super().__init__(f"the release of {deploy} is no longer kept; deploy its source again")


class Applier(Protocol):
    """Serves releases. Every method can be repeated. Those with a target may raise DeployError."""

    outage: asyncio.Event  # set while no release can be fetched

    async def prepare(self, target: Target) -> None:
        """Makes room for the address. Every step begins with this."""

    async def fetch(self, target: Target) -> None:
        """Gets the release, unless it is here."""

    async def check(self, target: Target) -> None:
        """Starts the release and requests `/`. Visitors still get the one before."""

    async def serve(self, target: Target) -> None:
        """Gives visitors the release. Fetches and checks it if necessary."""

    async def probe(self, target: Target) -> None:
        """Requests `/` as visitors do, in the canary."""

    async def finish(self, target: Target) -> None:
        """Ends the canary, and stops and removes what the release has replaced."""

    async def resume(self, target: Target) -> None:
        """Gives visitors the release again that this one has stopped or replaced."""

    async def remove(self, target: Target) -> None:
        """Gives visitors the release before again, and removes this one."""

    def lacks(self, wanted: Wanted) -> bool:
        """Returns whether the release that visitors should get is not here."""

    def note(self, wanted: Wanted) -> None:
        """Takes note of a new record, before its step is applied."""

    async def tidy(self, deploys: Set[str]) -> None:
        """Removes what is no longer needed, except for these deploys. The set changes while this runs."""
