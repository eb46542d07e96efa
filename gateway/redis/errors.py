"""Maps every failure of Redis to BackboneUnavailable, in the clients themselves.

Its subclass BackboneRefused means that Redis answered with an error. The original error is the `__cause__`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from gateway.errors import BackboneRefused, BackboneUnavailable

FAULTS = (RedisError, OSError, asyncio.TimeoutError)


@contextmanager
def map_redis_errors() -> Iterator[None]:
    """Maps the errors of the `with` block. The clients below use it, and code that bypasses their commands."""
    try:
        yield
    except ResponseError as error:
        raise BackboneRefused from error
    except FAULTS as error:
        raise BackboneUnavailable from error
    except (RuntimeError, AttributeError) as error:
        if not _passed_redis_py(error):
            raise
        raise BackboneUnavailable from error


def _passed_redis_py(error: BaseException) -> bool:
    """Returns whether the error came through redis-py, as it does when uvloop has closed a connection."""
    frames = (frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(module.get("__name__")).startswith("redis.") for module in frames)


class MappedClient(Redis):
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with map_redis_errors():
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> MappedPipeline:
        return MappedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class MappedPipeline(Pipeline):
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        with map_redis_errors():
            return await super().execute(raise_on_error)
