"""Maps every failure of Redis to BackboneUnavailable, in the clients themselves, and explains it.

Its subclass BackboneRefused means that Redis answered with an error. The original error is the `__cause__`. The
explanations, for log lines and responses, have no keys, values or addresses.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.errors import BackboneRefused, BackboneUnavailable, NotReplicated

# redis-py removes the code from the text of these errors.
_CODES: dict[type[Exception], str] = {
    AuthenticationError: "WRONGPASS",
    BusyLoadingError: "LOADING",
    ClusterDownError: "CLUSTERDOWN",
    MasterDownError: "MASTERDOWN",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}


# The fault, and what to do about it.
_BY_CODE = {
    "CLUSTERDOWN": ("the Redis cluster lacks a primary", "restore the primary, or promote a replica"),
    "LOADING": ("Redis is loading its data", "wait"),
    "MASTERDOWN": ("Redis is a replica without a connection to its primary", "name the primary in GATEWAY_REDIS_URL"),
    "MISCONF": ("Redis cannot save its data to disk", "free space on its disk"),
    "NOAUTH": ("Redis requires a password", "set it in GATEWAY_REDIS_URL, as in redis://:password@host:6379/0"),
    "NOPERM": ("the ACL of Redis forbids a command", "extend the ACL of the user in GATEWAY_REDIS_URL"),
    "NOREPLICAS": ("Redis has too few replicas", "start more replicas, or lower min-replicas-to-write of Redis"),
    "OOM": ("the memory of Redis is full", "raise maxmemory of Redis"),
    "READONLY": ("Redis is a read-only replica", "name the primary in GATEWAY_REDIS_URL"),
    "WRONGPASS": ("Redis rejects the user or the password", "correct them in GATEWAY_REDIS_URL"),
}
_ITS_LOG = "if it ends again, its log says why, such as a full disk"  # Valkey exits if `appendfsync always` fails
_SILENT = ("Redis does not answer", "start Redis, or check the host in GATEWAY_REDIS_URL and the firewalls")
_BY_TYPE: list[tuple[type[BaseException], tuple[str, str]]] = [
    (NotReplicated, ("fewer replicas of Redis confirm writes than GATEWAY_REDIS_WAIT requires", "start more replicas")),
    (MasterNotFoundError, ("no Sentinel names a primary", "check the Sentinels and the service in GATEWAY_REDIS_URL")),
    (
        ssl.SSLCertVerificationError,
        (
            "the certificate of Redis is not trusted",
            "set GATEWAY_CA_FILE to its authority, and use its host name in GATEWAY_REDIS_URL",
        ),
    ),
    (
        ssl.SSLError,
        ("the TLS handshake with Redis failed", "if Redis has no TLS, GATEWAY_REDIS_URL must begin with redis://"),
    ),
    (
        ConnectionRefusedError,
        (
            "Redis is not running",
            f"start Redis; {_ITS_LOG}. If it is running, correct the address in GATEWAY_REDIS_URL",
        ),
    ),
    (
        socket.gaierror,
        (
            "the host of Redis has no address",
            f"start its container; {_ITS_LOG}. If it is running, correct the host in GATEWAY_REDIS_URL or the DNS",
        ),
    ),
    (FileNotFoundError, ("the socket of Redis does not exist", "start Redis, or correct GATEWAY_REDIS_URL")),
    (
        PermissionError,
        ("this user may not open the socket of Redis", "let the user open the socket in GATEWAY_REDIS_URL"),
    ),
    (TimeoutError, _SILENT),
    (RedisTimeoutError, _SILENT),
]


def code_of(error: BaseException | None) -> str:
    """Returns Redis's error code, such as OOM, or for a fault of the connection the name of its type.

    `error` is the cause of a BackboneUnavailable.
    """
    for each in _chain(error):
        for kind, name in _CODES.items():
            if isinstance(each, kind):
                return name
        if code := re.match(r"[A-Z]{2,}(?= |$)", str(each)):
            return code[0]
    return type(error).__name__


def describe(error: BaseException | None) -> str:
    """Returns the fault as a clause, such as `the memory of Redis is full (OOM)`."""
    return _explain(error)[0]


def advise(error: BaseException | None) -> str:
    """Returns the remedy: which setting to change, or what to do to Redis."""
    return _explain(error)[1]


def concerns_every_write(error: BaseException | None) -> bool:
    """Returns whether the server would also refuse any other write."""
    return code_of(error) in _BY_CODE


def _explain(error: BaseException | None) -> tuple[str, str]:
    code = code_of(error)
    if code in _BY_CODE:
        reason, action = _BY_CODE[code]
        return f"{reason} ({code})", action
    for each in _chain(error):
        for kind, fault in _BY_TYPE:
            if isinstance(each, kind):
                return fault
    if any(isinstance(each, ConnectionError | RedisConnectionError) for each in _chain(error)):
        return (
            "Redis has ended the connection",
            f"start Redis if it is not running; {_ITS_LOG}. Otherwise, check GATEWAY_REDIS_URL",
        )
    return f"Redis cannot be reached ({code})", "check GATEWAY_REDIS_URL, and the log of Redis"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and its causes: redis-py wraps the errors of a connection."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


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
