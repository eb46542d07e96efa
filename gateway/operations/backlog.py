"""The workers' queues, the workers, the dead letters, and the accounts that store the most in Redis.

Workers are found as the consumers of their streams' groups, or in the list of workers that read no stream. A worker is
alive while its heartbeat key exists. Nothing scans keys, so reading the backlog costs the same for any number of
accounts, in a cluster too. Every function that reads raises BackboneUnavailable.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from gateway.accounts.registry import Registry
from gateway.deploys import records
from gateway.events import scripts, webhooks
from gateway.events.deliveries import SHARE_BYTES
from gateway.ids import Time, now_iso
from gateway.keys import (
    HEARTBEAT_SECONDS,
    PARTITION_TAGS,
    WORKER_STARTS_KEY,
    WORKER_STARTS_SECONDS,
    WORKERS_KEY,
    dead_letters_key,
    outcomes_key,
    stored_key,
    stream_key,
    worker_key,
)
from gateway.redis.client import Store
from gateway.redis.errors import map_redis_errors
from gateway.settings import Settings

TOP_ACCOUNTS = 8
NEWEST_LETTERS = 10


class DeadLetter(msgspec.Struct):
    """An entry of a stream that no worker could process."""

    stream: str
    entry: str  # its id in the stream
    at: Time  # of its removal from the stream
    reason: str
    fields: dict[str, str]  # each cut to its beginning


class DeadLetters(msgspec.Struct):
    count: int  # of 30 days, at most 100 per partition
    newest: list[DeadLetter]


class StoredAccount(msgspec.Struct):
    account: str
    name: str
    bytes: int  # of its delivery log and the data of its events


class StorageByAccount(msgspec.Struct):
    limit: int  # bytes per account
    top: list[StoredAccount]


async def count_dead_letters(store: Store) -> int:
    return sum(await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.xlen(dead_letters_key(tag))))


async def read_dead_letters(store: Store) -> DeadLetters:
    pages = await store.read_each(
        PARTITION_TAGS, lambda pipe, tag: pipe.xrevrange(dead_letters_key(tag), count=NEWEST_LETTERS)
    )
    letters = [letter for page in pages for letter in page]
    letters.sort(key=lambda letter: -int(letter[0].partition("-")[0]))
    return DeadLetters(await count_dead_letters(store), [_dead_letter(*letter) for letter in letters[:NEWEST_LETTERS]])


def _dead_letter(letter_id: str, letter: dict[str, str]) -> DeadLetter:
    at = now_iso(int(letter_id.partition("-")[0]) / 1000)
    try:
        fields = msgspec.json.decode(letter.get("fields", ""), type=dict[str, str])
    except msgspec.DecodeError:  # not written by the service; it must not hide the others
        fields = {}
    return DeadLetter(letter.get("stream", ""), letter.get("entry", ""), at, letter.get("reason", ""), fields)


async def read_storage(store: Store, registry: Registry) -> StorageByAccount:
    """Returns the accounts that store the most."""
    pages = await store.read_each(
        PARTITION_TAGS, lambda pipe, tag: pipe.zrevrange(stored_key(tag), 0, TOP_ACCOUNTS - 1, withscores=True)
    )
    stored = [(account, int(count)) for page in pages for account, count in page]
    top = []
    for account, count in sorted(stored, key=lambda each: -each[1])[:TOP_ACCOUNTS]:
        if await scripts.forget_stored_bytes(store, account):
            continue
        record = await registry.account(account)
        top.append(StoredAccount(account, record.name if record else "", count))
    return StorageByAccount(SHARE_BYTES, top)


STREAMS = {webhooks.GROUP: webhooks.STREAM, records.GROUP: records.STREAM}
GROUPS = (*STREAMS, "monitors", "sites")


class Queue(msgspec.Struct):
    """The state of a queue, summed over all partitions."""

    waiting: int = 0  # entries without an outcome
    pending: int = 0  # waiting entries that a worker has claimed
    oldestMs: int | None = None

    def add(
        self, length: int, oldest: Sequence[tuple[str, Any]], consumers: Iterable[dict[str, Any]], now: int
    ) -> None:
        self.waiting += length
        self.pending += sum(consumer["pending"] for consumer in consumers)
        for entry, _ in oldest:
            self.oldestMs = max(self.oldestMs or 0, now - int(entry.partition("-")[0]), 0)


class Worker(msgspec.Struct):
    group: str
    name: str
    heartbeatMs: int | None  # since the last heartbeat; None for a dead worker
    pending: int


class QueueBacklog(msgspec.Struct):
    webhooks: Queue
    deploys: Queue
    workers: list[Worker]  # those alive, and dead ones with pending entries
    outcomes: dict[str, int]  # of all deliveries so far

    def count_workers_alive(self, settings: Settings) -> dict[str, int]:
        """Returns the number of workers by group, without groups that an external engine replaces."""
        replaced = ("deploys", "sites") if settings.deploy_engine == "external" else ()
        groups = [worker.group for worker in self.workers if worker.heartbeatMs is not None]
        return {group: groups.count(group) for group in GROUPS if group not in replaced}


async def read_backlog(store: Store, now: int) -> QueueBacklog:
    """Reads all queues and workers. `now` is Redis's clock in ms."""
    tags = PARTITION_TAGS
    async with store.client.pipeline(transaction=False) as pipe:
        for tag in tags:
            pipe.hgetall(outcomes_key(tag))
            for group, stream in STREAMS.items():
                pipe.xlen(stream_key(tag, stream))
                pipe.xrange(stream_key(tag, stream), count=1)
                pipe.xinfo_consumers(stream_key(tag, stream), group)
        answers = iter(await pipe.execute(raise_on_error=False))
    queues = {group: Queue() for group in STREAMS}
    outcomes: dict[str, int] = {}
    pending: dict[tuple[str, str], int] = {}
    for _ in tags:
        for outcome, count in _value(next(answers)).items():
            outcomes[outcome] = outcomes.get(outcome, 0) + int(count)
        for group in STREAMS:
            length, oldest, consumers = (_value(next(answers)) for _ in range(3))
            queues[group].add(length, oldest, consumers, now)
            for consumer in consumers:
                name = (group, consumer["name"])
                pending[name] = pending.get(name, 0) + consumer["pending"]
    listed = await store.client.smembers(WORKERS_KEY)
    for group, _, name in (member.partition(":") for member in listed):
        pending.setdefault((group, name), 0)
    workers = await _read_workers(store, pending)
    if dead := listed - {f"{worker.group}:{worker.name}" for worker in workers}:
        await store.client.srem(WORKERS_KEY, *dead)
    return QueueBacklog(queues[webhooks.GROUP], queues[records.GROUP], workers, outcomes)


def _value(answer: Any) -> Any:
    """Returns the answer, or raises its error. A stream or group that no worker has created yet counts as empty."""
    if isinstance(answer, RedisError) and str(answer).startswith(("NOGROUP", "no such key")):
        return []
    if isinstance(answer, BaseException):
        with map_redis_errors():
            raise answer
    return answer


async def _read_workers(store: Store, pending: dict[tuple[str, str], int]) -> list[Worker]:
    left = await store.read_each(pending, lambda pipe, worker: pipe.pttl(worker_key(*worker)))
    workers = [
        Worker(group, name, HEARTBEAT_SECONDS * 1000 - life if life > 0 else None, pending[group, name])
        for (group, name), life in zip(pending, left, strict=True)
    ]
    workers.sort(key=lambda worker: (worker.group, worker.name))
    return [worker for worker in workers if worker.heartbeatMs is not None or worker.pending]


async def count_worker_starts(store: Store, now: int) -> dict[str, int]:
    """Returns by group how often its workers started in the last 15 minutes, on the host where they did most often.

    Those that run count as one, because an update starts each of a host's workers once. `now` is Redis's clock in ms.
    """
    found = await store.client.zrangebyscore(WORKER_STARTS_KEY, now // 1000 - WORKER_STARTS_SECONDS, "+inf")
    starts = [member.split(":") for member in found]
    heartbeats = await store.get_all([worker_key(group, name) for group, name, _ in starts])
    distinct = {
        (group, name.rpartition("-")[0], "" if heartbeat == token else token)
        for (group, name, token), heartbeat in zip(starts, heartbeats, strict=True)
    }
    counts = Counter((group, host) for group, host, _ in distinct)
    return {group: max((count for (of, _), count in counts.items() if of == group), default=0) for group in GROUPS}
