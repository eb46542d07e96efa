"""The connections to Redis of one process.

Failure policy: every command and script raises BackboneUnavailable when Redis fails, or BackboneRefused when it answers
with an error. No command is repeated here: a command without an answer may have run, and only its caller knows whether
it may run twice. When another server becomes the primary, the connections move to it (`primary.py`).
"""

import asyncio
import hashlib
import inspect
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet

import structlog
from redis.asyncio.client import PubSub
from redis.exceptions import NoScriptError, ResponseError

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneRefused, BackboneUnavailable, NotReplicated
from gateway.ids import day_of
from gateway.keys import PARTITION_TAGS, write_check_key
from gateway.redis import servers
from gateway.redis.cluster import BlockingReads, ClusterClient, ClusterPipeline
from gateway.redis.errors import FAULTS, code_of, describe, map_redis_errors
from gateway.redis.pipeline import Pipeline, parse_run_id
from gateway.redis.primary import PrimaryWatch
from gateway.redis.replication import Replicated, make_pipeline

logger = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.1
LUA_FOLDER = Path(__file__).parents[2] / "lua"
SCANNED = 500  # keys that one SCAN looks at
COMMAND_SECONDS = 2.0  # that one command may take by default

T = TypeVar("T")


async def until_redis_answers(attempt: Callable[[], Awaitable[T]], *, waiting: str = "") -> T:
    """Repeats `attempt`, which must be idempotent, until Redis answers. Pauses for 0.1 to 1 second in between.

    `waiting` is the log event for the first failure; without it, nothing is logged.
    """
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            result = await attempt()
        except BackboneUnavailable as error:
            if waiting and pause == FIRST_PAUSE_SECONDS:
                logger.warning(waiting, error=code_of(error.__cause__), reason=describe(error.__cause__))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
        else:
            end_if_canceled()
            return result


class _Patient:
    def __init__(self, service: object, waiting: str) -> None:
        self._service, self._waiting = service, waiting

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._service, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **options: until_redis_answers(partial(found, *args, **options), waiting=self._waiting)


def patient(service: T, *, waiting: str = "") -> T:
    """Returns a view of a service, or of a store, whose async methods repeat until Redis answers.

    Call only methods that are idempotent through it. They are repeated as a whole, because a command may rely on what
    an earlier one has read or confirmed. `waiting` is that of `until_redis_answers`.
    """
    return cast(T, _Patient(service, waiting))


def flatten(fields: Mapping[str, str | int]) -> list[str | int]:
    """Returns names and values alternately, as arguments of a script."""
    return [part for pair in fields.items() for part in pair]


class Script:
    """A file of `lua/`, preceded by the shared files that its lines `-- uses …` name.

    The writes of a `durable` script need as many replicas as a reservation.
    """

    def __init__(self, name: str, *, durable: bool = False) -> None:
        self.durable = durable
        own = (LUA_FOLDER / f"{name}.lua").read_text()
        shared = re.findall(r"^-- uses ([\w/]+)$", own, re.MULTILINE)
        self.source = "\n".join([*((LUA_FOLDER / f"{file}.lua").read_text() for file in shared), own])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Store:
    """A client for all commands and scripts. Reads that block (subscriptions, streams) get connections of their own."""

    def __init__(
        self, url: str, *, ca_file: str = "", replicas: int = 0, command_seconds: float = COMMAND_SECONDS
    ) -> None:
        """`ca_file` has certificates to trust beside the public ones. `replicas` must confirm each durable write.

        A command may take `command_seconds` before Redis counts as unreachable.
        """
        self.url, self.replicas, self.command_seconds = url, replicas, command_seconds
        self._servers = servers.parse(url, ca_file)
        self.cluster = self._servers.kind == "cluster"
        self._sentinels = self._servers.sentinels(command_seconds)
        self._listeners: list[Callable[[], None]] = []
        self._clients: WeakSet[Any] = WeakSet()  # of redis-py; their connections move with the primary
        self._primary: object = None  # the last result of `_find_primary`
        self._watch = PrimaryWatch(self._check_primary, self._sentinels.sentinels if self._sentinels else ())
        # For scripts. In a cluster, other commands use separate connections, so that long replies delay no script.
        self._pipeline = self._make_pipeline()
        self._replicated = self._make_pipeline(replicas) if replicas else self._pipeline
        self._commands = self._make_cluster_pipeline() if self.cluster else None
        self.client: Any
        if self._commands is not None:
            self.client = ClusterClient(self._commands)
        else:
            self.client = self._new_client(command_seconds, 1024)
        self._pipeline.on_change = self._notify_change

    def _make_pipeline(self, replicas: int = 0) -> Pipeline | ClusterPipeline:
        if self.cluster:
            return self._make_cluster_pipeline(replicas)
        find = None if self._sentinels is None else self._ask_sentinels
        pipeline = make_pipeline(self._servers.url, self.command_seconds, find, replicas)
        pipeline.request_check = self._watch.request_check
        return pipeline

    def _make_cluster_pipeline(self, replicas: int = 0) -> ClusterPipeline:
        return ClusterPipeline(self._servers.url, self._servers.nodes, self.command_seconds, replicas=replicas)

    def _new_client(self, timeout: float | None, connections: int) -> Any:
        client = self._servers.client(timeout, self.command_seconds, connections, self._sentinels)
        self._clients.add(client)
        return client

    # -- which server is the primary -------------------------------------------------------------------------

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever a primary was replaced or restarted. Its last writes may be lost."""
        self._listeners.append(listener)

    def _notify_change(self) -> None:
        for listener in self._listeners:
            listener()

    async def _ask_sentinels(self) -> tuple[str, int]:
        assert self._sentinels is not None
        with map_redis_errors():
            return await self._sentinels.discover_master(self._servers.service)

    async def _check_primary(self) -> None:
        """Closes the connections to a server that is no longer the primary."""
        try:
            primary = await self._find_primary()
        except BackboneUnavailable:  # the next command reports it
            return
        disconnected = False
        for pipeline in (self._pipeline, self._replicated):
            if isinstance(pipeline, Pipeline):
                connected_to = pipeline.run_id if self._sentinels is None else pipeline.address
                disconnected |= connected_to not in ("", primary) and pipeline.disconnect()
        if self._primary not in (None, primary):
            logger.warning("redis.primary_changed")
            if disconnected or self._sentinels is not None:  # otherwise a restart has closed all connections
                for client in list(self._clients):
                    with suppress(Exception):  # all connections of the pool are closed before an error is raised
                        await client.connection_pool.disconnect()
        self._primary = primary
        if isinstance(self._pipeline, Pipeline):  # the new connection reveals whether the server is another one
            with suppress(*FAULTS, BackboneUnavailable):
                await self._pipeline.connect()

    async def _find_primary(self) -> object:
        """Returns what identifies the primary: its address, or without Sentinels the id of its run."""
        if self._sentinels is not None:
            return await self._ask_sentinels()
        probe = Pipeline(self._servers.url, self.command_seconds)
        try:
            with map_redis_errors():
                return parse_run_id(await probe.call("INFO", "server"))
        finally:
            await probe.close()

    async def run_script(
        self, script: Script, script_keys: Sequence[str], *args: str | int, replicated: bool = False
    ) -> Any:
        """Runs a script; only the functions of a `scripts.py` call this. Raises BackboneUnavailable.

        With `replicated`, returns `Replicated` once `replicas` replicas have the writes, or after half a second. A
        durable script raises NotReplicated if too few replicas confirm its writes.
        """
        if script.durable and self.replicas and not replicated:
            return self._require_replicas(await self.run_script(script, script_keys, *args, replicated=True))
        rest = (len(script_keys), *script_keys, *args)
        pipeline = self._replicated if replicated else self._pipeline
        try:  # as `map_redis_errors` does, without its cost: each request to a model runs two scripts
            return await pipeline.call("EVALSHA", script.sha, *rest)
        except NoScriptError:
            pass
        except ResponseError as error:
            raise BackboneRefused from error
        except FAULTS as error:
            raise BackboneUnavailable from error
        with map_redis_errors():
            return await pipeline.call("EVAL", script.source, *rest)

    def blocking_client(self) -> Any:
        """Returns a client for reads that block, without a deadline for commands. The caller closes it."""
        if self._commands is not None:
            return BlockingReads(self._commands, lambda node: self._servers.node_client(*node, self.command_seconds))
        return self._new_client(None, 64)

    async def get(self, key: str) -> str | None:
        value: str | None = await self.client.get(key)
        return value

    async def increment(self, key: str, seconds: int) -> tuple[int, int]:
        """Increments a counter that resets `seconds` after its first increment.

        Returns its value and the seconds until it resets. Raises BackboneUnavailable.
        """
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.incr(key)
            pipe.expire(key, seconds, nx=True)
            pipe.ttl(key)
            count, _, resets_in = await pipe.execute()
        return count, resets_in

    async def read_changed(
        self, key: Callable[[str], str], version: str, versions: dict[str, str]
    ) -> AsyncIterator[tuple[str, dict[str, str]]]:
        """Yields the tag and the fields of each partition's hash whose field `version` differs from `versions`.

        Updates `versions` once the caller has used the fields. Raises BackboneUnavailable.
        """
        found = await self.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.hget(key(tag), version))
        for tag, present in zip(PARTITION_TAGS, found, strict=True):
            if versions.get(tag) != (present or ""):
                fields: dict[str, str] = await self.client.hgetall(key(tag))
                read = fields.pop(version, "")
                yield tag, fields
                versions[tag] = read

    async def take_back(self, key: str, seconds: int) -> None:
        """Takes back an `increment`. Raises BackboneUnavailable."""
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.decr(key)
            pipe.expire(key, seconds, nx=True)  # it may just have been reset
            await pipe.execute()

    async def today(self) -> str:
        """Returns the UTC day by Redis's clock. Raises BackboneUnavailable."""
        return day_of((await self.client.time())[0] * 1000)

    async def read_skew(self) -> float:
        """Returns by how many seconds this machine's clock is ahead of Redis's. Raises BackboneUnavailable."""
        before = time.time()
        seconds, microseconds = await self.client.time()
        skew: float = (before + time.time()) / 2 - seconds - microseconds / 1_000_000
        return skew

    async def read_each(self, items: Collection[T], read: Callable[[Any, T], object]) -> list[Any]:
        """Returns the answers to the command that `read` adds to a pipeline for each item, in one round trip.

        Raises BackboneUnavailable.
        """
        async with self.client.pipeline(transaction=False) as pipeline:
            for item in items:
                read(pipeline, item)
            answers: list[Any] = await pipeline.execute() if items else []
            return answers

    async def get_all(self, names: Sequence[str]) -> list[str | None]:
        """Reads keys of any partitions together. Raises BackboneUnavailable."""
        return await self.read_each(names, lambda pipe, name: pipe.get(name))

    async def check_writes(self) -> tuple[int, list[BackboneUnavailable]]:
        """Writes a probe key, in a cluster one for each partition, and waits for replicas as admissions do.

        Returns the number of keys and the faults.
        """
        names = [write_check_key(tag) for tag in PARTITION_TAGS][: None if self.cluster else 1]
        results = await asyncio.gather(*map(self._check_write, names))
        return len(names), [fault for fault in results if fault is not None]

    async def confirm_writes(self, tag: str) -> None:
        """Waits until `replicas` have all earlier writes to this partition. Raises BackboneUnavailable."""
        if self.replicas:
            with map_redis_errors():
                await self._write_replicated(write_check_key(tag))

    async def _check_write(self, name: str) -> BackboneUnavailable | None:
        try:
            with map_redis_errors():
                await (self._write_replicated(name) if self.replicas else self.client.set(name, "1", ex=60))
        except BackboneUnavailable as fault:
            return fault
        return None

    async def _write_replicated(self, name: str) -> None:
        command = ("SET", name, "1", "EX", 60)
        if isinstance(self._replicated, ClusterPipeline):
            self._require_replicas(await self._replicated.call_at(name, *command))
        else:
            self._require_replicas(await self._replicated.call(*command))

    def _require_replicas(self, written: Replicated) -> Any:
        if written.replicas < self.replicas:
            raise NotReplicated
        return written.answer

    async def info(self) -> list[dict[str, Any]]:
        """Returns the INFO of the server, or of each primary of a cluster."""
        if self._commands is None:
            return [await self.client.info()]
        with map_redis_errors():
            answers = await self._commands.call_everywhere("INFO")
        return [self.client.parse("INFO", answer) for answer in answers]

    async def read_option(self, name: str) -> list[str]:
        """Returns an option of the server, or of each primary of a cluster; '' if its ACL hides options.

        Raises BackboneUnavailable.
        """
        values = []
        for call in await self._list_calls():
            try:
                with map_redis_errors():
                    _, value = await call("CONFIG", "GET", name)
            except (BackboneRefused, ValueError):  # some providers of Redis have no such command
                value = ""
            values.append(value)
        return values

    async def list_keys(self, pattern: str = "*", tag: str = "") -> set[str]:
        """Returns the keys that match, in a cluster those of every primary, or of the one that has the partition `tag`.

        Reads all names there: only for what is rare. Raises BackboneUnavailable.
        """
        found: set[str] = set()
        with map_redis_errors():
            for call in await self._list_calls(tag):
                cursor = ""
                while cursor != "0":
                    cursor, names = await call("SCAN", cursor or "0", "MATCH", pattern, "COUNT", SCANNED)
                    found.update(names)
        return found

    async def _list_calls(self, tag: str = "") -> list[Callable[..., Awaitable[Any]]]:
        """Returns the functions that send a command to a primary."""
        if self._commands is None:
            return [self._pipeline.call]
        return [partial(self._commands.call_at, f"{tag}:")] if tag else await self._commands.list_calls()

    @asynccontextmanager
    async def subscription(self, *channels: str) -> AsyncIterator[PubSub]:
        """Subscribes to channels on a separate connection. A cluster passes messages on to every node."""
        node: tuple[str, int] | None = None
        if self._commands is not None:
            with map_redis_errors():
                node = await self._commands.find_any_address()
            client = self._servers.node_client(*node, self.command_seconds)
        else:
            client = self._new_client(None, 1)
        try:
            with map_redis_errors():
                async with client.pubsub() as subscription:
                    # The client itself has no timeout, because messages may be rare.
                    async with asyncio.timeout(self.command_seconds):
                        await subscription.subscribe(*channels)
                    yield subscription
        except Exception:
            if self._commands is not None and node is not None:
                self._commands.forget_address(node)  # the next subscription tries another node
            raise
        finally:
            await client.aclose()

    async def close(self) -> None:
        await self._watch.close()
        await self._pipeline.close()
        await self._replicated.close()
        if self._commands is not None:
            await self._commands.close()
        await self.client.aclose()
        if self._sentinels is not None:
            await self._sentinels.aclose()
