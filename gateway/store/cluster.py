"""Calls of scripts in Redis Cluster: a `Pipeline` to each primary, so that they cost what they cost on one server.

The slots' owners are read from any node that answers (`CLUSTER SLOTS`), anew when a node was lost or redirected a call,
and at most once at a time.

A call is sent a second time only where a node said that it did not run it: MOVED and ASK name the node that does,
TRYAGAIN asks for a little patience while the keys of a slot move. All of that ends after `REDIRECTIONS` or with the
time limit of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from redis.crc import key_slot
from redis.exceptions import ClusterDownError, RedisError, ResponseError

from gateway.store.pipeline import Pipeline
from gateway.store.replication import make_pipeline

SLOTS = 16_384
REDIRECTIONS = 8
TRY_AGAIN_PAUSE = 0.05  # seconds
FIRST_KEY = 3  # EVALSHA <sha> <number of keys> <first key>


class ClusterPipeline:
    def __init__(self, url: str, seeds: Sequence[tuple[str, int]], timeout: float, *, replicas: int = 0) -> None:
        """`url` holds what all nodes share; `timeout` is in seconds, as for a `Pipeline`.

        With `replicas`, calls are those of a `ReplicatedPipeline`.
        """
        self._url, self._seeds, self._timeout, self._wait = url, seeds, timeout, replicas
        self._pipelines: dict[tuple[str, int], Pipeline] = {}
        self._retired: set[Pipeline] = set()  # of nodes that own nothing any more, while their calls are answered
        self._owners: list[Pipeline | None] = [None] * SLOTS
        self._refreshing: asyncio.Task[None] | None = None

    async def call(self, *command: str | int | bytes) -> Any:
        """Calls the script at the node that has its first key. Raises as `Pipeline.call` does."""
        slot = _slot(str(command[FIRST_KEY]).partition("}")[0])
        pipeline = self._owners[slot]
        if pipeline is None:
            pipeline = await self._find_owner(slot)
        for _ in range(REDIRECTIONS):
            try:
                return await pipeline.call(*command)
            except ResponseError as error:
                code, *words = str(error).split()
                if code == "MOVED":
                    self._refresh_soon()
                    pipeline = self._owners[slot] = self._redirect(words[1], pipeline)
                elif code == "ASK":
                    return await self._redirect(words[1], pipeline).call_asking(*command)
                elif code == "TRYAGAIN":
                    await asyncio.sleep(TRY_AGAIN_PAUSE)
                else:
                    if code in ("CLUSTERDOWN", "READONLY", "MASTERDOWN", "LOADING"):
                        self._forget(pipeline)
                    raise
            except (TimeoutError, RedisError, OSError):
                self._forget(pipeline)
                raise
        raise ClusterDownError("too many redirections")

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        for pipeline in (*self._pipelines.values(), *self._retired):
            await pipeline.close()

    # -- who owns a slot -------------------------------------------------------------------------------------

    async def _find_owner(self, slot: int) -> Pipeline:
        await asyncio.shield(self._refresh_soon())
        pipeline = self._owners[slot]
        if pipeline is None:
            raise ClusterDownError("no node has the slot")
        return pipeline

    def _forget(self, lost: Pipeline) -> None:
        """The node is lost, or no primary any more: the next calls for its slots first find out who is."""
        if lost in self._owners:
            self._owners = [None if owner is lost else owner for owner in self._owners]
            self._refresh_soon()

    def _refresh_soon(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing.add_done_callback(_retrieve)
        return self._refreshing

    async def _refresh(self) -> None:
        """Asks all nodes for the owners; the first answer counts. Raises the last fault if none answers."""
        fault: Exception = ClusterDownError("the cluster has no nodes")
        asked = [asyncio.create_task(self._ask(address)) for address in {*self._pipelines, *self._seeds}]
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    address, slots = await answer
                except (TimeoutError, RedisError, OSError) as error:
                    fault = error
                else:
                    return self._learn(address, slots)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise fault

    async def _ask(self, address: tuple[str, int]) -> tuple[tuple[str, int], Sequence[Any]]:
        return address, await self._pipeline_to(address).call("CLUSTER", "SLOTS")

    def _learn(self, asked: tuple[str, int], slots: Sequence[Any]) -> None:
        owners: list[Pipeline | None] = [None] * SLOTS
        for first, last, primary, *_ in slots:
            host, port = primary[0] or asked[0], int(primary[1])  # a node may not know its own host
            owners[first : last + 1] = [self._pipeline_to((host, port))] * (last + 1 - first)
        self._owners = owners
        in_use = set(owners)
        for address in [address for address, pipeline in self._pipelines.items() if pipeline not in in_use]:
            self._retired.add(self._pipelines.pop(address))
        for pipeline in self._retired:
            pipeline.close_when_idle()
        self._retired = {pipeline for pipeline in self._retired if pipeline.is_open()}

    def _redirect(self, address: str, asked: Pipeline) -> Pipeline:
        """To the `host:port` of a redirection; without a host it is the host of the node that was asked."""
        host, _, port = address.rpartition(":")
        if not host:
            host = next(known[0] for known, pipeline in self._pipelines.items() if pipeline is asked)
        return self._pipeline_to((host, int(port)))

    def _pipeline_to(self, address: tuple[str, int]) -> Pipeline:
        pipeline = self._pipelines.get(address)
        if pipeline is None:

            async def find() -> tuple[str, int]:
                return address

            pipeline = self._pipelines[address] = make_pipeline(self._url, self._timeout, find, self._wait)
        return pipeline


@lru_cache(maxsize=4096)
def _slot(key: str) -> int:
    """`key`: up to its hash tag's closing brace, so that a partition's keys share one entry of the cache."""
    return key_slot(key.partition("{")[2].encode() or key.encode())


def _retrieve(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
