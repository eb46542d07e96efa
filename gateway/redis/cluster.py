"""Redis Cluster: a `Pipeline` to each primary, so that a call costs what it costs on one server.

The owners of the slots come from the first node that answers `CLUSTER SLOTS`. They are read again when a node is lost
or redirects a call, and one read runs at a time.

A call is repeated only if a node answers that it has not run it. MOVED and ASK name the node to call. TRYAGAIN means
that the slot is migrating: until all its keys have moved, Redis rejects scripts of which some key does not exist yet.
A call fails after `ATTEMPTS`, or at its time limit.

redis-py's own cluster client is not used, because it keeps connections to nodes that are gone. On uvloop it also writes
to closed connections, which raises errors that are not redis-py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Self

from redis.asyncio import Redis
from redis.commands import AsyncCoreCommands
from redis.crc import key_slot
from redis.event import EventDispatcher
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from gateway.cancellation import cancel
from gateway.redis.errors import FAULTS, map_redis_errors
from gateway.redis.pipeline import NOT_PRIMARY_CODES, Notice, Pipeline
from gateway.redis.replication import make_pipeline

SLOTS = 16_384
ATTEMPTS = 40  # for one call; for a migrating slot, they are spread over its time limit
REFRESH_SECONDS = 0.5  # at least, between two reads of the owners because of errors that hint at a failover
FIRST_KEY = 3  # EVALSHA <sha> <number of keys> <first key>
LOST_CODES = ("CLUSTERDOWN", *NOT_PRIMARY_CODES)  # codes of a node that is not a primary now

Address = tuple[str, int]


class ClusterPipeline:
    def __init__(self, url: str, seeds: Sequence[Address], timeout: float, *, replicas: int = 0) -> None:
        """`url` has the options that all nodes share. `timeout` is in seconds, as for a `Pipeline`.

        With `replicas`, calls return what those of a `ReplicatedPipeline` return.
        """
        self._url, self._seeds, self._timeout, self._wait = url, seeds, timeout, replicas
        self._pipelines: dict[Address, Pipeline] = {}
        self._replicas: set[Address] = set()  # they may know the owners when all primaries are lost
        self._retired: set[Pipeline] = set()  # of nodes without slots, until their pending calls are answered
        self._owners: list[Pipeline | None] = [None] * SLOTS
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = 0.0  # monotonic seconds
        self._layout: Sequence[Any] = ()  # of the slots, as it was last read
        self.on_change: Notice = lambda: None  # called when a primary was replaced or restarted

    def call(self, *command: str | int | bytes) -> Awaitable[Any]:
        """Runs a script at the primary of its first key."""
        return self.call_at(str(command[FIRST_KEY]), *command)

    async def call_at(self, key: str, *command: str | int | bytes) -> Any:
        """Sends the command to the primary that has the key. Raises as `Pipeline.call` does."""
        slot = _slot(key.partition("}")[0])
        pipeline, asking = self._owners[slot], False
        if pipeline is None or not pipeline.is_connected():
            pipeline = await self._connect(slot)
        for _ in range(ATTEMPTS):
            try:
                return await (pipeline.call_asking(*command) if asking else pipeline.call(*command))
            except ResponseError as error:
                code, _, rest = str(error).partition(" ")
                if code == "MOVED":
                    self._refresh_soon()
                    pipeline, asking = self._redirect(rest.split()[1], pipeline), False
                    self._owners[slot] = pipeline
                elif code == "ASK":
                    pipeline, asking = self._redirect(rest.split()[1], pipeline), True
                elif code == "TRYAGAIN":
                    await asyncio.sleep(self._timeout / ATTEMPTS)
                else:
                    if code in LOST_CODES:
                        self._forget(pipeline)
                    raise
            except FAULTS:
                self._forget(pipeline)
                raise
        raise ClusterDownError("too many redirections")

    async def call_anywhere(self, *command: str) -> Any:
        """Sends the command to the primaries in turn until one answers."""
        fault: Exception | None = None
        for pipeline in await self._primaries():
            try:
                return await pipeline.call(*command)
            except FAULTS as error:
                self._forget(pipeline)
                fault = error
        raise fault or ClusterDownError("the cluster has no nodes")

    async def call_everywhere(self, *command: str) -> list[Any]:
        """Sends the command to all primaries and returns their answers."""
        return await asyncio.gather(*(pipeline.call(*command) for pipeline in await self._primaries()))

    async def list_calls(self) -> list[Callable[..., Awaitable[Any]]]:
        """Returns for each primary the function that sends it a command."""
        return [pipeline.call for pipeline in await self._primaries()]

    async def close(self) -> None:
        self._owners = [None] * SLOTS
        if self._refreshing is not None:
            await cancel(self._refreshing)
        for pipeline in (*self._pipelines.values(), *self._retired):
            await pipeline.close()

    # -- who owns a slot -------------------------------------------------------------------------------------

    async def find_address(self, key: str) -> Address:
        """Returns the address of the primary that has the key. Raises as `call` does."""
        slot = _slot(key.partition("}")[0])
        return (self._owners[slot] or await self._find_owner(slot)).address

    async def find_any_address(self) -> Address:
        return (await self._primaries())[0].address

    def forget_address(self, address: Address) -> None:
        """Stops using a node whose connection failed, or that is no longer a primary."""
        if (pipeline := self._pipelines.get(address)) is not None:
            self._forget(pipeline)

    async def _connect(self, slot: int) -> Pipeline:
        """Connects to the owner of the slot, or if that fails, to its successor: nothing has been sent yet."""
        pipeline = self._owners[slot] or await self._find_owner(slot)
        try:
            await pipeline.connect()
        except FAULTS:
            self._forget(pipeline)
            successor = self._owners[slot] or await self._find_owner(slot)
            if successor is pipeline:
                raise
            return successor
        return pipeline

    async def _find_owner(self, slot: int) -> Pipeline:
        await asyncio.shield(self._refresh_soon())
        pipeline = self._owners[slot]
        if pipeline is None:
            raise ClusterDownError("no node has the slot")
        return pipeline

    async def _primaries(self) -> list[Pipeline]:
        """Returns all primaries in random order."""
        if not any(self._owners):
            await asyncio.shield(self._refresh_soon())
        found = list({pipeline for pipeline in self._owners if pipeline is not None})
        random.shuffle(found)
        if not found:
            raise ClusterDownError("no node has a slot")
        return found

    def _forget(self, lost: Pipeline) -> None:
        """Stops using a node as an owner. The next calls for its slots first read the owners."""
        if lost in self._owners:
            self._owners = [None if owner is lost else owner for owner in self._owners]
            self._refresh_soon()

    def _refresh_soon(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing.add_done_callback(_ignore_result)
        return self._refreshing

    async def _refresh(self) -> None:
        """Reads the owners from the first node that knows all of them, or from the one that knows the most.

        Raises the last fault if no node answers.
        """
        fault: Exception = ClusterDownError("the cluster has no nodes")
        fullest: tuple[int, Address, Sequence[Any]] | None = None
        addresses = {*self._pipelines, *self._seeds, *self._replicas}
        asked = [asyncio.create_task(self._ask_for_slots(address)) for address in addresses]
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    address, slots = await answer
                except FAULTS as error:
                    fault = error
                    continue
                known = sum(last + 1 - first for first, last, *_ in slots)
                if fullest is None or known > fullest[0]:
                    fullest = known, address, slots
                if known == SLOTS:  # a node that has just joined may not know all
                    break
        finally:
            await cancel(*asked)
        if fullest is None:
            raise fault
        self._set_owners(*fullest[1:])

    async def _ask_for_slots(self, address: Address) -> tuple[Address, Sequence[Any]]:
        slots = await self._pipeline_to(address).call("CLUSTER", "SLOTS")
        if not slots:
            raise ClusterDownError("the node knows no slots")
        return address, slots

    def _refresh_if_due(self, pipeline: Pipeline) -> None:
        """Reads the owners again, because another node may have the pipeline's slots now."""
        now = time.monotonic()
        if pipeline in self._owners and now > self._refreshed_at + REFRESH_SECONDS:
            self._refreshed_at = now
            self._refresh_soon()

    def _set_owners(self, asked: Address, slots: Sequence[Any]) -> None:
        owners: list[Pipeline | None] = [None] * SLOTS
        self._replicas = set()
        for first, last, *nodes in slots:
            primary, *replicas = ((_host(host, asked), int(port)) for host, port, *_ in nodes)
            owners[first : last + 1] = [self._pipeline_to(primary)] * (last + 1 - first)
            self._replicas.update(replicas)
        self._owners = owners
        layout = [(first, last, owners[first].address) for first, last, *_ in sorted(slots)]
        if self._layout not in ((), layout):
            self.on_change()
        self._layout = layout
        in_use = set(owners)
        for address in [address for address, pipeline in self._pipelines.items() if pipeline not in in_use]:
            self._retired.add(self._pipelines.pop(address))
        for pipeline in self._retired:
            pipeline.close_when_idle()
        self._retired = {pipeline for pipeline in self._retired if pipeline.is_open()}

    def _redirect(self, address: str, asked: Pipeline) -> Pipeline:
        """Returns the pipeline to the `host:port` of a redirection."""
        host, _, port = address.rpartition(":")
        return self._pipeline_to((_host(host, asked.address), int(port)))

    def _pipeline_to(self, address: Address) -> Pipeline:
        pipeline = self._pipelines.get(address)
        if pipeline is None:

            async def find() -> Address:
                return address

            pipeline = self._pipelines[address] = make_pipeline(self._url, self._timeout, find, self._wait)
            pipeline.address = address
            pipeline.request_check = partial(self._refresh_if_due, pipeline)
            pipeline.on_change = lambda: self.on_change()
        return pipeline


class ClusterClient(AsyncCoreCommands):
    """Sends each of redis-py's commands to the primary of its first key, or to any primary if it has no key."""

    _event_dispatcher = EventDispatcher()  # redis-py requires one

    def __init__(self, pipeline: ClusterPipeline) -> None:
        self._pipeline = pipeline
        self._parsers = Redis(protocol=2).response_callbacks

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with map_redis_errors():
            return await self.send(*args, **options)

    async def send(self, *args: Any, **options: Any) -> Any:
        """Raises redis-py's errors."""
        name, *rest = args
        call = (
            self._pipeline.call_at(str(rest[0]), *name.split(), *rest) if rest else self._pipeline.call_anywhere(name)
        )
        return self.parse(name, await call, **options)

    def parse(self, name: str, answer: Any, **options: Any) -> Any:
        options.pop("keys", None)  # for redis-py's cache
        return self._parsers[name](answer, **options) if name in self._parsers else answer

    def pipeline(self, transaction: bool = True) -> _Batch:
        """Commands for one node run in their order, but commands of other clients may run in between."""
        return _Batch(self)

    async def aclose(self) -> None:
        """Does nothing: the connections belong to the pipeline."""


class _Batch(AsyncCoreCommands):
    """A batch of commands that are sent together."""

    _event_dispatcher = EventDispatcher()

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **options: Any) -> Self:
        self._commands.append((args, options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self._commands = self._commands, []
        calls = (self._client.send(*args, **options) for args, options in commands)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        with map_redis_errors():
            for answer in answers:
                if isinstance(answer, BaseException) and raise_on_error:
                    raise answer
        return answers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()


class BlockingReads:
    """A reader that waits for entries of streams, on a separate connection to each primary."""

    def __init__(self, pipeline: ClusterPipeline, connect: Callable[[Address], Any]) -> None:
        """`connect` returns redis-py's client of one node."""
        self._pipeline, self._connect = pipeline, connect
        self._clients: dict[Address, Any] = {}

    async def xreadgroup(self, group: str, consumer: str, streams: dict[str, str], **options: Any) -> Any:
        with map_redis_errors():
            return await self._xreadgroup(group, consumer, streams, **options)

    async def _xreadgroup(self, group: str, consumer: str, streams: dict[str, str], **options: Any) -> Any:
        address = await self._pipeline.find_address(next(iter(streams)))
        try:
            return await self._client(address).xreadgroup(group, consumer, streams, **options)
        except MovedError:
            self._pipeline.forget_address(address)
            raise
        except AskError as error:  # the slot is migrating, and the stream has moved
            async with self._client((error.host or address[0], error.port)).client() as one:
                await one.execute_command("ASKING")
                return await one.xreadgroup(group, consumer, streams, **options)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                self._pipeline.forget_address(address)
            raise
        except FAULTS:
            self._pipeline.forget_address(address)
            raise

    def _client(self, address: Address) -> Any:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    async def aclose(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _host(host: str | None, asked: Address) -> str:
    """Returns the host, or that of the node which answered if that node does not know its own."""
    return asked[0] if host in (None, "", "?") else host


@lru_cache(maxsize=4096)
def _slot(key: str) -> int:
    """Returns the slot of a key cut after its hash tag, so that a partition's keys share one entry of the cache."""
    return key_slot(key.partition("{")[2].encode() or key.encode())


def _ignore_result(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
