"""The connections to Redis, and what its failures become."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import structlog
from redis.asyncio.client import PubSub
from redis.exceptions import NoScriptError, ResponseError

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneRefused, BackboneUnavailable, NotReplicated
from gateway.ids import day_of
from gateway.redis import servers
from gateway.redis.cluster import BlockingReads, ClusterClient, ClusterPipeline
from gateway.redis.errors import FAULTS, backbone
from gateway.redis.faults import code_of, describe
from gateway.redis.partitions import PARTITION_TAGS, write_check_key
from gateway.redis.pipeline import Pipeline, run_of
from gateway.redis.primary import PrimaryWatch
from gateway.redis.replication import Replicated, make_pipeline

logger = structlog.get_logger()

FIRST_PAUSE = 0.1  # seconds
LUA = Path(__file__).parents[2] / "lua"
ATTEMPT = 2.0  # seconds that one command may take before Redis counts as unreachable

T = TypeVar("T")


async def until_redis_answers(attempt: Callable[[], Awaitable[T]], *, waiting: str = "") -> T:
    """Repeats `attempt` until Redis answers, with pauses of 0.1 to 1 second. The attempt must bear a repetition.

    `waiting` names the log event of the first failure; without it nothing is logged.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            result = await attempt()
        except BackboneUnavailable as error:
            if waiting and pause == FIRST_PAUSE:
                logger.warning(waiting, error=code_of(error.__cause__), reason=describe(error.__cause__))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
        else:
            end_if_canceled()
            return result


def flatten(fields: Mapping[str, str | int]) -> list[str | int]:
    """Names and values in turn, as arguments of a script."""
    return [part for pair in fields.items() for part in pair]


class Script:
    """A file of `lua/`, behind the shared files that its lines `-- uses …` name.

    What a `durable` one writes must be on as many replicas as reservations must.
    """

    def __init__(self, name: str, *, durable: bool = False) -> None:
        self.durable = durable
        own = (LUA / f"{name}.lua").read_text()
        shared = re.findall(r"^-- uses ([\w/]+)$", own, re.MULTILINE)
        self.source = "\n".join([*((LUA / f"{file}.lua").read_text() for file in shared), own])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Store:
    """One client for every command, and separate connections for reads that block (subscriptions, streams)."""

    def __init__(self, url: str, *, ca_file: str = "", replicas: int = 0) -> None:
        """`ca_file`: certificates to trust beside the public ones; `replicas`: that must have a reservation."""
        self.url, self.replicas = url, replicas
        self._servers = servers.parse(url, ca_file)
        self.cluster = self._servers.kind == "cluster"
        self._sentinels = self._servers.sentinels(ATTEMPT)
        self._listeners: list[Callable[[], None]] = []
        self._clients: WeakSet[Any] = WeakSet()  # redis-py's, whose connections move with the primary
        self._primary: object = None  # as `_find_primary` told it last
        self._watch = PrimaryWatch(self._check_primary, self._sentinels.sentinels if self._sentinels else ())
        # For scripts. In a cluster, other commands have connections of their own too: long answers delay no script.
        self._pipeline = self._make_pipeline()
        self._replicated = self._make_pipeline(replicas) if replicas else self._pipeline
        self._commands = self._make_cluster_pipeline() if self.cluster else None
        self.client: Any
        if self._commands is not None:
            self.client = ClusterClient(self._commands)
        else:
            self.client = self._new_client(ATTEMPT, 1024)
        self._pipeline.changed = self._tell_change

    def _make_pipeline(self, replicas: int = 0) -> Pipeline | ClusterPipeline:
        if self.cluster:
            return self._make_cluster_pipeline(replicas)
        find = None if self._sentinels is None else self._ask_sentinels
        pipeline = make_pipeline(self._servers.url, ATTEMPT, find, replicas)
        pipeline.doubt = self._watch.doubt
        return pipeline

    def _make_cluster_pipeline(self, replicas: int = 0) -> ClusterPipeline:
        return ClusterPipeline(self._servers.url, self._servers.nodes, ATTEMPT, replicas=replicas)

    def _new_client(self, timeout: float | None, connections: int) -> Any:
        client = self._servers.client(timeout, ATTEMPT, connections, self._sentinels)
        self._clients.add(client)
        return client

    # -- which server is the primary -------------------------------------------------------------------------

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls it whenever a primary is another server than before, or was restarted.

        The last writes of the former one may be lost.
        """
        self._listeners.append(listener)

    def _tell_change(self) -> None:
        for listener in self._listeners:
            listener()

    async def _ask_sentinels(self) -> tuple[str, int]:
        assert self._sentinels is not None
        with backbone():
            return await self._sentinels.discover_master(self._servers.service)

    async def _check_primary(self) -> None:
        """Moves the connections that lead to another server than the primary."""
        try:
            primary = await self._find_primary()
        except BackboneUnavailable:  # whoever needs Redis says so
            return
        left = False
        for pipeline in (self._pipeline, self._replicated):
            if isinstance(pipeline, Pipeline):
                leads_to = pipeline.run if self._sentinels is None else pipeline.address
                left |= leads_to not in ("", primary) and pipeline.leave()
        if self._primary not in (None, primary):
            logger.warning("redis.primary_changed")
            if left or self._sentinels is not None:  # otherwise the server was restarted, which ended all connections
                for client in list(self._clients):
                    await client.connection_pool.disconnect()
        self._primary = primary
        if isinstance(self._pipeline, Pipeline):  # whether it is another server shows when it is connected
            with suppress(*FAULTS):
                await self._pipeline.connect()

    async def _find_primary(self) -> object:
        """What tells the primary from its predecessor: its address, or behind one address the id of its run."""
        if self._sentinels is not None:
            return await self._ask_sentinels()
        probe = Pipeline(self._servers.url, ATTEMPT)
        try:
            with backbone():
                return run_of(await probe.call("INFO", "server"))
        finally:
            await probe.close()

    async def run_script(
        self, script: Script, script_keys: Sequence[str], *args: str | int, replicated: bool = False
    ) -> Any:
        """Only functions of a `scripts.py` call this. Raises BackboneUnavailable, or BackboneRefused.

        With `replicated`, returns `Replicated`, after `replicas` have what was written, or after half a second. A
        durable script raises NotReplicated then.
        """
        if script.durable and self.replicas and not replicated:
            return self._confirmed(await self.run_script(script, script_keys, *args, replicated=True))
        rest = (len(script_keys), *script_keys, *args)
        pipeline = self._replicated if replicated else self._pipeline
        try:  # what `backbone` does, without its cost: each request to a model runs two scripts
            return await pipeline.call("EVALSHA", script.sha, *rest)
        except NoScriptError:
            pass
        except ResponseError as error:
            raise BackboneRefused from error
        except FAULTS as error:
            raise BackboneUnavailable from error
        with backbone():
            return await pipeline.call("EVAL", script.source, *rest)

    def blocking_client(self) -> Any:
        """A client for reads that block: it has no deadline for commands. The caller closes it."""
        if self._commands is not None:
            return BlockingReads(self._commands, lambda node: self._servers.node_client(*node, ATTEMPT))
        return self._new_client(None, 64)

    async def get(self, key: str) -> str | None:
        value: str | None = await self.client.get(key)
        return value

    async def count(self, key: str, seconds: int) -> tuple[int, int]:
        """How often this was called in that time, this call included, and the seconds until the count begins anew.

        Raises BackboneUnavailable.
        """
        async with self.client.pipeline(transaction=True) as pipe:
            pipe.incr(key)
            pipe.expire(key, seconds, nx=True)
            pipe.ttl(key)
            count, _, resets_in = await pipe.execute()
        return count, resets_in

    async def today(self) -> str:
        """The UTC day by Redis's clock. Raises BackboneUnavailable."""
        return day_of((await self.client.time())[0] * 1000)

    async def get_all(self, names: Sequence[str]) -> list[str | None]:
        """The values of keys in any partitions, read together. Raises BackboneUnavailable."""
        async with self.client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.get(name)
            values: list[str | None] = await pipeline.execute() if names else []
            return values

    async def check_writes(self) -> tuple[int, list[BackboneUnavailable]]:
        """Writes keys that nobody reads, in a cluster one in each partition, and waits for replicas as admissions do.

        Returns their number, and the faults.
        """
        names = [write_check_key(tag) for tag in PARTITION_TAGS][: None if self.cluster else 1]
        results = await asyncio.gather(*map(self._check_write, names))
        return len(names), [fault for fault in results if fault is not None]

    async def confirm(self, tag: str) -> None:
        """Returns once `replicas` have what was written to this partition before. Raises BackboneUnavailable."""
        if self.replicas:
            with backbone():
                await self._write_replicated(write_check_key(tag))

    async def _check_write(self, name: str) -> BackboneUnavailable | None:
        try:
            with backbone():
                await (self._write_replicated(name) if self.replicas else self.client.set(name, "1", ex=60))
        except BackboneUnavailable as fault:
            return fault
        return None

    async def _write_replicated(self, name: str) -> None:
        command = ("SET", name, "1", "EX", 60)
        if isinstance(self._replicated, ClusterPipeline):
            self._confirmed(await self._replicated.call_at(name, *command))
        else:
            self._confirmed(await self._replicated.call(*command))

    def _confirmed(self, written: Replicated) -> Any:
        if written.replicas < self.replicas:
            raise NotReplicated
        return written.answer

    async def info(self) -> list[dict[str, Any]]:
        """The INFO of the server, or of each primary of a cluster."""
        if self._commands is None:
            return [await self.client.info()]
        return [self.client.parse("INFO", answer) for answer in await self._commands.call_everywhere("INFO")]

    @asynccontextmanager
    async def subscription(self, *channels: str) -> AsyncIterator[PubSub]:
        """Subscribes to channels on a connection of its own. A cluster passes messages on to every node."""
        node: tuple[str, int] | None = None
        if self._commands is not None:
            node = await self._commands.find_any_address()
            client = self._servers.node_client(*node, ATTEMPT)
        else:
            client = self._new_client(None, 1)
        try:
            with backbone():
                async with client.pubsub() as subscription:
                    await subscription.subscribe(*channels)
                    yield subscription
        except Exception:
            if self._commands is not None and node is not None:
                self._commands.forget_address(node)  # the next subscription looks for a node that answers
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
