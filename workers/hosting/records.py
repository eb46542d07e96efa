"""What all hosts serve, in Redis: one record per address of an app, and the hosts' answers.

A builder writes the record of an address for each step of a deploy. Every host follows the records of all addresses and
answers each step. So a host that was away needs no history: it reads what is wanted now.

| step | what a host does with the deploy's release |
| --- | --- |
| `check` | fetches it, checks its digest, starts and checks it; `served` stays what visitors get |
| `canary` | serves it, and keeps asking for `/` at the public address |
| `live` | serves it, and stops and prunes what it replaced |
| `undo` | serves `served` again, and removes it |
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
import structlog

from gateway.deploys import scripts
from gateway.deploys.addresses import address
from gateway.deploys.keys import HOSTS_KEY, answers_key, served_apps_key, serving_key, tagged_serving_key
from gateway.deploys.states import Deploy, StaleDeploy
from gateway.redis.client import Store
from gateway.redis.partitions import PARTITION_TAGS, partition_tag
from workers.hosting.archives import Archive

logger = structlog.get_logger()

HOST_LIFETIME = 15.0  # seconds without a heartbeat after which a host does not count
ANSWER_SECONDS = 3_600  # that answers are kept
BATCH = 100  # records read in one round trip

Step = Literal["check", "canary", "live", "undo"]


class Release(Archive, frozen=True):
    """An archive, and what else a host needs to serve it."""

    runs: bool = False  # it has a start command
    environment: str = ""  # of its start command, sealed


class Wanted(msgspec.Struct, frozen=True):
    account: str
    app: str  # id
    address: str
    step: Step
    deploy: str
    served: str = ""  # the deploy that was served before it; empty for none
    releases: dict[str, Release] = {}  # by deploy: all that are kept
    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))  # of this step; answers repeat it

    @property
    def serves(self) -> str:
        """The deploy that visitors get."""
        return self.deploy if self.step in ("canary", "live") else self.served


class Answer(msgspec.Struct, frozen=True):
    token: str
    ok: bool
    reason: str = ""
    answers: int = 0  # good ones in the canary so far
    output: list[str] = []  # the last lines of a start command


class Records:
    """Every method raises BackboneUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def read(self, account: str, app_id: str) -> dict[str, tuple[str, Wanted]]:
        """By address: the record as it stands, and what it says."""
        found: dict[str, str] = await self._store.client.hgetall(serving_key(account, app_id))
        return {name: (text, msgspec.json.decode(text, type=Wanted)) for name, text in found.items()}

    async def write(self, deploy: Deploy, before: str, wanted: Wanted, state: str) -> None:
        """Raises StaleDeploy when the deploy is not in this state ('' for any), or the record has changed."""
        if not await scripts.set_serving(
            self._store,
            deploy.account,
            deploy.appId,
            deploy.id,
            state,
            address(deploy.kind, deploy.branch),
            before,
            msgspec.json.encode(wanted).decode(),
        ):
            raise StaleDeploy

    async def confirm(self, account: str) -> None:
        """Returns once replicas have what was written of the account before, where replicas are waited for."""
        await self._store.confirm(partition_tag(account))

    async def forget(self, deploy: Deploy, name: str) -> None:
        """For an address of the deploy's app that is no longer kept."""
        await self._store.client.hdel(serving_key(deploy.account, deploy.appId), name)

    async def changes(self, seen: dict[str, float]) -> AsyncIterator[list[Wanted]]:
        """What changed in any partition since `seen`, which it updates: versions by the partitions' tags."""
        tags = PARTITION_TAGS
        async with self._store.client.pipeline(transaction=False) as pipeline:
            for tag in tags:
                pipeline.zrangebyscore(served_apps_key(tag), f"({seen.get(tag, 0):.0f}", "+inf", withscores=True)
            changed = await pipeline.execute()
        for tag, apps in zip(tags, changed, strict=True):
            for first in range(0, len(apps), BATCH):
                batch = apps[first : first + BATCH]
                async with self._store.client.pipeline(transaction=False) as pipeline:
                    for app_id, _ in batch:
                        pipeline.hvals(tagged_serving_key(tag, app_id))
                    found = await pipeline.execute()
                yield [wanted for texts in found for text in texts if (wanted := _read_wanted(text)) is not None]
                seen[tag] = float(batch[-1][1])

    # -- hosts -----------------------------------------------------------------------------------------------

    async def attend(self, host: str = "") -> list[str]:
        return await scripts.heartbeat_host(self._store, host, round(HOST_LIFETIME * 1000))

    async def leave(self, host: str) -> None:
        """The others need not wait for a host that is stopped."""
        await self._store.client.zrem(HOSTS_KEY, host)

    async def answer(self, wanted: Wanted, host: str, answer: Answer) -> None:
        key = answers_key(wanted.account, wanted.deploy)
        async with self._store.client.pipeline(transaction=False) as pipeline:
            pipeline.hset(key, host, msgspec.json.encode(answer))
            pipeline.expire(key, ANSWER_SECONDS)
            await pipeline.execute()

    async def answers(self, wanted: Wanted) -> dict[str, Answer]:
        """Of the hosts that have answered this step."""
        found = await self._store.client.hgetall(answers_key(wanted.account, wanted.deploy))
        answers = {host: msgspec.json.decode(text, type=Answer) for host, text in found.items()}
        return {host: answer for host, answer in answers.items() if answer.token == wanted.token}


def _read_wanted(text: str) -> Wanted | None:
    """One damaged record does not stop the others."""
    try:
        return msgspec.json.decode(text, type=Wanted)
    except msgspec.MsgspecError as error:
        logger.error("sites.unreadable", error=str(error))
        return None
