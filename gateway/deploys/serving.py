"""The serving records in Redis: one record per address of an app, and the answer to its step.

A builder writes the record of an address for each step of a deploy. What serves the apps follows the records of all
addresses and answers each step: a host, or a cluster's worker. If it was away, it needs no history, because each record
has the current step.

| step | action of what serves the apps |
| --- | --- |
| `check` | fetches the release, checks its digest, starts it and checks it; visitors still get `served` |
| `canary` | serves the release, and repeats its check at the public address |
| `live` | serves the release, and stops and prunes the releases that it replaced |
| `undo` | serves `served` again, and removes the release; a preview that has served nothing else ends |

One engine serves at a time. It holds a key in Redis, and others stand by or end (`workers/hosting/hold_engine.py`).

It reads the releases from the storage. Without shared storage, that is the data folder of one host. Redis then
remembers the id of this folder for a week after its last renewal. A host or a builder with another data
folder, such as an empty one on a new machine, stands by: it does not have the apps, and visitors could not reach what
it serves.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
import structlog

from gateway.deploys import scripts
from gateway.deploys.release import Release
from gateway.deploys.states import StaleDeploy
from gateway.keys import (
    APPS_FOLDER_KEY,
    ENGINE_KEY,
    PARTITION_TAGS,
    REPORTS_KEY,
    answer_key,
    partition_tag,
    served_apps_key,
    serving_key,
    tagged_serving_key,
)
from gateway.loops import batched
from gateway.redis.client import Store
from gateway.redis.scripts import Location, hold_key

logger = structlog.get_logger()

REPORT_SECONDS = 90  # that a host's report counts
HOLD_SECONDS = 15.0  # without a renewal, after which another engine may serve the apps
FOLDER_SECONDS = 7 * 86_400  # after the last renewal, in which Redis remembers the folder that holds the apps
ANSWER_SECONDS = 3_600  # that an answer is kept
BATCH_RECORDS = 100  # read in one round trip
ELSEWHERE = (
    "the apps are in another data folder, so this worker stands by; if that folder no longer exists, delete the key "
    f"{APPS_FOLDER_KEY} in Redis"
)

Step = Literal["check", "canary", "live", "undo"]


def new_token() -> str:
    return secrets.token_hex(8)


class Wanted(msgspec.Struct, frozen=True):
    """The record of an address: the current step, and the releases that may be needed."""

    account: str
    app: str  # id
    address: str
    step: Step
    deploy: str
    served: str = ""  # the deploy that was served before; empty for none
    releases: dict[str, Release] = {}  # all kept releases, by deploy
    token: str = msgspec.field(default_factory=new_token)  # identifies this step, for the answer

    @property
    def serves(self) -> str:
        """The deploy whose release visitors get."""
        return self.deploy if self.step in ("canary", "live") else self.served

    @property
    def ends(self) -> bool:
        """Whether this is a preview without a release to serve, which ends."""
        return self.step == "undo" and not self.served and self.address != "live"

    @property
    def runs(self) -> bool:
        """Whether this is a live address with a start command now."""
        deploys = {"live": [self.deploy], "undo": [self.served]}.get(self.step, [self.deploy, self.served])
        return self.address == "live" and any(self.releases[name].runs for name in deploys if name in self.releases)


class Holder(msgspec.Struct, frozen=True):
    """The engine that serves the apps."""

    id: str  # of a host's data folder, or of a cluster's worker
    name: str  # for operators


class StepAnswer(msgspec.Struct, frozen=True):
    """The answer to a step."""

    token: str
    ok: bool
    reason: str = ""
    served: bool = False  # whether visitors got the release before it failed, in the canary
    good_probes: int = 0  # in the canary so far
    output: list[str] = []  # the last lines of a start command
    service_fault: bool = False  # whether the service has failed, not the app


class HostReport(msgspec.Struct, frozen=True):
    """What a host that serves apps has found out about itself."""

    at: int  # by Redis's clock, ms
    stands_by: bool  # because the apps are in another data folder
    missing: int  # addresses whose release is neither on the host nor in the storage
    disk_free: float  # share of the data folder's disk, 0 to 1
    certificate_left: float | None  # share of the lifetime of the service's own certificate; None if Caddy has none


class Records:
    """The serving records. Every method raises BackboneUnavailable.

    `folder`: the id of the data folder that is the storage; '' for a shared storage.
    """

    def __init__(self, store: Store, folder: str = "") -> None:
        self._store, self._folder = store, folder

    async def read(self, account: str, app_id: str) -> dict[str, tuple[str, Wanted]]:
        """Reads the records of an app: for each address, the stored text and the decoded record."""
        found: dict[str, str] = await self._store.client.hgetall(serving_key(account, app_id))
        return {name: (text, msgspec.json.decode(text, type=Wanted)) for name, text in found.items()}

    async def list_kept(self, account: str, app_id: str) -> set[str]:
        """Returns the ids of the deploys whose releases are kept."""
        return {deploy for _, wanted in (await self.read(account, app_id)).values() for deploy in wanted.releases}

    async def write(self, before: str, wanted: Wanted, state: str) -> None:
        """Replaces the record `before`.

        Raises StaleDeploy if the deploy is not in this state ('' for any), or the record has changed.
        """
        account, app, text = wanted.account, wanted.app, msgspec.json.encode(wanted).decode()
        if not await scripts.set_serving(self._store, account, app, wanted.deploy, state, wanted.address, before, text):
            raise StaleDeploy

    async def confirm(self, account: str) -> None:
        """Waits until replicas have the account's earlier writes, if the settings require replicas."""
        await self._store.confirm_writes(partition_tag(account))

    async def end(self, account: str, app_id: str, name: str) -> bool:
        """Ends a preview: what serves the apps removes it, and then its record. Returns False if there is no record."""
        while True:
            before, known = (await self.read(account, app_id)).get(name, ("", None))
            if known is None or known.ends:
                return known is not None
            with contextlib.suppress(StaleDeploy):  # a deploy has just changed the record
                await self.write(before, Wanted(account, app_id, name, "undo", known.deploy), "")
                return True

    async def forget(self, wanted: Wanted) -> None:
        """Removes a record that nobody needs any more, unless it has changed."""
        before, known = (await self.read(wanted.account, wanted.app)).get(wanted.address, ("", None))
        if known is not None and known.token == wanted.token:
            await scripts.set_serving(
                self._store, wanted.account, wanted.app, wanted.deploy, "", wanted.address, before, ""
            )

    async def read_changes(self, seen: dict[str, float]) -> AsyncIterator[list[Wanted]]:
        """Yields the records that have changed in any partition since `seen`, and updates `seen`.

        `seen` has the version of each partition, by its tag.
        """
        tags = PARTITION_TAGS
        async with self._store.client.pipeline(transaction=False) as pipeline:
            for tag in tags:
                pipeline.zrangebyscore(served_apps_key(tag), f"({seen.get(tag, 0):.0f}", "+inf", withscores=True)
            changed = await pipeline.execute()
        for tag, apps in zip(tags, changed, strict=True):
            for batch in batched(apps, BATCH_RECORDS):
                async with self._store.client.pipeline(transaction=False) as pipeline:
                    for app_id, _ in batch:
                        pipeline.hvals(tagged_serving_key(tag, app_id))
                    found = await pipeline.execute()
                yield [wanted for texts in found for text in texts if (wanted := _read_wanted(text)) is not None]
                seen[tag] = float(batch[-1][1])

    # -- what serves the apps --------------------------------------------------------------------------------

    async def hold_engine(self, holder: Holder) -> Holder | None:
        """Makes the caller the engine, or keeps it so. Returns the engine; None if the apps are in another folder."""
        return await self._hold(holder, HOLD_SECONDS)

    async def leave_engine(self, holder: Holder) -> None:
        """Ends this, if the caller is the engine."""
        await self._hold(holder, 0)

    async def _hold(self, holder: Holder, seconds: float) -> Holder | None:
        text = msgspec.json.encode(holder).decode()
        location = Location(APPS_FOLDER_KEY, self._folder, FOLDER_SECONDS)
        found = await hold_key(self._store, ENGINE_KEY, text, round(seconds * 1000), location=location)
        return msgspec.json.decode(found, type=Holder) if found else None

    async def has_engine(self) -> bool:
        """Returns whether something serves the apps."""
        return bool(await self._store.client.exists(ENGINE_KEY))

    async def is_elsewhere(self) -> bool:
        """Returns whether the apps are in another data folder."""
        return bool(self._folder) and await self._store.get(APPS_FOLDER_KEY) not in (None, self._folder)

    async def write_report(self, host: str, report: HostReport) -> None:
        async with self._store.client.pipeline(transaction=False) as pipeline:
            pipeline.hset(REPORTS_KEY, host, msgspec.json.encode(report))
            pipeline.expire(REPORTS_KEY, REPORT_SECONDS)
            await pipeline.execute()

    async def read_reports(self, now: int) -> list[HostReport]:
        """Reads the reports of the hosts that are alive, and forgets the others. `now`: by Redis's clock, ms."""
        found = await self._store.client.hgetall(REPORTS_KEY)
        reports = {host: msgspec.json.decode(text, type=HostReport) for host, text in found.items()}
        if old := [host for host, report in reports.items() if report.at < now - REPORT_SECONDS * 1000]:
            await self._store.client.hdel(REPORTS_KEY, *old)
        return [report for host, report in reports.items() if host not in old]

    async def write_answer(self, wanted: Wanted, answer: StepAnswer) -> None:
        text = msgspec.json.encode(answer).decode()
        await self._store.client.set(answer_key(wanted.account, wanted.deploy), text, ex=ANSWER_SECONDS)

    async def read_answer(self, wanted: Wanted) -> StepAnswer | None:
        """Reads the answer to this step; None if there is none yet."""
        found = await self._store.get(answer_key(wanted.account, wanted.deploy))
        answer = msgspec.json.decode(found, type=StepAnswer) if found else None
        return answer if answer is not None and answer.token == wanted.token else None


def _read_wanted(text: str) -> Wanted | None:
    """Decodes a record. Returns None, and logs an error, if it is damaged, so that the other records still work."""
    try:
        return msgspec.json.decode(text, type=Wanted)
    except msgspec.MsgspecError as error:
        logger.error("sites.unreadable", error=str(error))
        return None
