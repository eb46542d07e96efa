"""The Redis client: one for every command, and connections of their own for what waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from gateway.errors import BackboneUnavailable
from gateway.store.keys import (
    CHANGES,
)
from gateway.store.pipeline import Wire
from gateway.store.scripts import Script

ATTEMPT = 2.0  # seconds that one command may take before Redis counts as unreachable
# redis-py's cluster errors are no RedisError.
FAULTS = (RedisError, RedisClusterException, OSError, asyncio.TimeoutError)


@contextmanager
def backbone() -> Iterator[None]:
    """Whatever Redis fails with leaves as one answer."""
    try:
        yield
    except FAULTS as error:
        raise BackboneUnavailable from error


class Store:
    """One client for every command, and connections of their own for what waits (subscriptions, blocking reads)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cluster = urlsplit(url).scheme.endswith("+cluster")
        # No automatic retries: a command whose answer was lost may have run, and its caller must know.
        options: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": ATTEMPT,
            "socket_connect_timeout": ATTEMPT,
            "retry": Retry(NoBackoff(), 0),
        }
        self.client: Any = (
            RedisCluster.from_url(url.replace("+cluster", ""), **options)
            if self.cluster
            else Redis.from_url(url, max_connections=1024, **options)
        )
        # In a cluster the scripts go the client's way, which knows the nodes and follows what moves.
        self.wire = None if self.cluster else Wire(url, ATTEMPT)
        self._change = Script("change")

    async def run(self, script: Script, keys: list[str], *args: str | int) -> Any:
        """The token path's way to run a script. Raises one of FAULTS."""
        if self.wire is None:
            return await script(self.client, keys, *args)
        try:
            return await self.wire.call("EVALSHA", script.sha, len(keys), *keys, *args)
        except ResponseError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            return await self.wire.call("EVAL", script.source, len(keys), *keys, *args)

    def blocking_client(self) -> Any:
        """For reads that wait: without the deadline of a command. The caller closes it."""
        options: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": None,
            "socket_connect_timeout": ATTEMPT,
            "retry": Retry(NoBackoff(), 0),
        }
        if self.cluster:
            return RedisCluster.from_url(self.url.replace("+cluster", ""), **options)
        return Redis.from_url(self.url, max_connections=64, **options)

    async def keep_looking(self) -> None:
        """Runs as long as the process: ends a connection that does not answer."""
        if self.wire is not None:
            await self.wire.keep_looking()
        else:
            await asyncio.Event().wait()

    async def get(self, key: str) -> str | None:
        with backbone():
            value: str | None = await self.client.get(key)
            return value

    async def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Of any partitions, in one go. Raises one of FAULTS."""
        async with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.get(key)
            values: list[str | None] = await pipeline.execute() if keys else []
            return values

    async def info(self) -> list[dict[str, Any]]:
        """What the server says of itself, or each node of a cluster."""
        if not self.cluster:
            return [await self.client.info()]
        return list((await self.client.info(target_nodes=RedisCluster.PRIMARIES)).values())

    async def change(self, key: str, value: str, *, expected: str | None = None) -> bool:
        """Writes ('' removes) and announces a record; with `expected`, only while it holds that."""
        with backbone():
            check = "any" if expected is None else "same"
            return bool(await self._change(self.client, [key], CHANGES, check, expected or "", value))

    @asynccontextmanager
    async def subscription(self) -> AsyncIterator[PubSub]:
        """A subscription to the changes, on a connection of its own; messages reach every node of a cluster."""
        parts = urlsplit(self.url.replace("+cluster", ""))
        if self.cluster:
            await self.client.initialize()
            node = self.client.get_random_node()
            credentials, _, _ = parts.netloc.rpartition("@")
            host = f"[{node.host}]" if ":" in node.host else node.host
            parts = parts._replace(netloc=f"{credentials}{'@' if credentials else ''}{host}:{node.port}", path="")
        client = Redis.from_url(
            urlunsplit(parts), decode_responses=True, socket_timeout=None, socket_connect_timeout=ATTEMPT
        )
        try:
            async with client.pubsub() as subscription:
                await subscription.subscribe(CHANGES)
                yield subscription
        finally:
            await client.aclose()

    async def close(self) -> None:
        if self.wire is not None:
            self.wire.close()
        await self.client.aclose()
