"""The connections to Redis, and what its failures become."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import structlog
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from gateway.cancellation import end_if_cancelled
from gateway.errors import BackboneRefused, BackboneUnavailable
from gateway.store import keys
from gateway.store.pipeline import Pipeline

logger = structlog.get_logger()

FIRST_PAUSE = 0.1  # seconds
LUA = Path(__file__).parents[2] / "lua"
ATTEMPT = 2.0  # seconds that one command may take before Redis counts as unreachable
# redis-py's cluster errors do not inherit from RedisError.
_FAULTS = (RedisError, RedisClusterException, OSError, asyncio.TimeoutError)

# Errors of a server that takes no writes. Without retries, naming them as worth one only closes the connection: its
# address may lead to a new primary by now.
NOT_PRIMARY: list[type[Exception]] = [ReadOnlyError, MasterDownError, BusyLoadingError]

T = TypeVar("T")


@contextmanager
def backbone() -> Iterator[None]:
    """Turns every failure of Redis into BackboneUnavailable, or BackboneRefused if Redis answered with an error."""
    try:
        yield
    except ResponseError as error:
        raise BackboneRefused from error
    except _FAULTS as error:
        raise BackboneUnavailable from error


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
                logger.warning(waiting, error=repr(error.__cause__))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
        else:
            end_if_cancelled()
            return result


class Script:
    """A file of `lua/`, behind the shared files that its lines `-- uses …` name."""

    def __init__(self, name: str) -> None:
        own = (LUA / f"{name}.lua").read_text()
        shared = re.findall(r"^-- uses (\w+)$", own, re.MULTILINE)
        self.source = "\n".join([*((LUA / f"{file}.lua").read_text() for file in shared), own])
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class Store:
    """One client for every command, and separate connections for reads that block (subscriptions, streams)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cluster = urlsplit(url).scheme.endswith("+cluster")
        # No automatic retries: a command whose answer was lost may have run, and its caller must know.
        options: dict[str, Any] = {
            "decode_responses": True,
            "encoding_errors": "replace",
            "socket_timeout": ATTEMPT,
            "socket_connect_timeout": ATTEMPT,
            "retry": Retry(NoBackoff(), 0),
        }
        self.client: Any = (
            RedisCluster.from_url(url.replace("+cluster", ""), **options)
            if self.cluster
            else Redis.from_url(url, max_connections=1024, retry_on_error=NOT_PRIMARY, **options)
        )
        # In a cluster the client runs the scripts: it knows the nodes and follows slots that move.
        self._pipeline = None if self.cluster else Pipeline(url, ATTEMPT)
        self._call: Callable[..., Awaitable[Any]] = (
            self.client.execute_command if self._pipeline is None else self._pipeline.call
        )

    async def run_script(self, script: Script, script_keys: Sequence[str], *args: str | int) -> Any:
        """Only `gateway.store.scripts` calls this. Raises BackboneUnavailable, or BackboneRefused."""
        rest = (len(script_keys), *script_keys, *args)
        try:  # what `backbone` does, without its cost: each request to a model runs two scripts
            return await self._call("EVALSHA", script.sha, *rest)
        except ResponseError as error:
            if not isinstance(error, NoScriptError) and not str(error).startswith("NOSCRIPT"):
                raise BackboneRefused from error
        except _FAULTS as error:
            raise BackboneUnavailable from error
        with backbone():
            return await self._call("EVAL", script.source, *rest)

    def blocking_client(self) -> Any:
        """A client for reads that block: it has no deadline for commands. The caller closes it."""
        options: dict[str, Any] = {
            "decode_responses": True,
            "encoding_errors": "replace",  # one entry that is not UTF-8 must not end the reading of all others
            "socket_timeout": None,
            "socket_connect_timeout": ATTEMPT,
            "retry": Retry(NoBackoff(), 0),
        }
        if self.cluster:
            return RedisCluster.from_url(self.url.replace("+cluster", ""), **options)
        return Redis.from_url(self.url, max_connections=64, **options)

    async def get(self, key: str) -> str | None:
        with backbone():
            value: str | None = await self.client.get(key)
            return value

    async def get_all(self, names: Sequence[str]) -> list[str | None]:
        """The values of keys in any partitions, read together. Raises BackboneUnavailable."""
        with backbone():
            async with self.client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.get(name)
                values: list[str | None] = await pipeline.execute() if names else []
                return values

    async def check_writes(self) -> None:
        """Writes a key that nobody reads. Raises BackboneUnavailable where Redis is away, full, or a replica."""
        with backbone():
            await self.client.set(keys.WRITE_CHECK, "1", ex=60)

    async def info(self) -> list[dict[str, Any]]:
        """The INFO of the server, or of each primary of a cluster."""
        if not self.cluster:
            return [await self.client.info()]
        return list((await self.client.info(target_nodes=RedisCluster.PRIMARIES)).values())

    @asynccontextmanager
    async def subscription(self, *channels: str) -> AsyncIterator[PubSub]:
        """Subscribes to channels on a connection of its own. A cluster passes messages on to every node."""
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
                await subscription.subscribe(*channels)
                yield subscription
        finally:
            await client.aclose()

    async def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        await self.client.aclose()
