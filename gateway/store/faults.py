"""What is wrong with Redis, in words that a log line or an answer may hold: never a key, a value or an address."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.errors import NotReplicated

# redis-py takes the code off the text of these.
_CODES: dict[type[Exception], str] = {
    AuthenticationError: "WRONGPASS",
    BusyLoadingError: "LOADING",
    ClusterDownError: "CLUSTERDOWN",
    MasterDownError: "MASTERDOWN",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}
_REASONS = {
    "CLUSTERDOWN": "the cluster of Redis lacks a primary",
    "LOADING": "Redis is loading its data",
    "MASTERDOWN": "Redis is a replica that has lost its primary",
    "MISCONF": "Redis cannot save to its disk",
    "NOAUTH": "Redis asks for a password",
    "NOPERM": "the access list of Redis forbids a command",
    "NOREPLICAS": "Redis has too few replicas",
    "OOM": "the memory of Redis is full",
    "READONLY": "Redis is a read-only replica",
    "WRONGPASS": "Redis refuses the user or the password",
}
_CONNECTION_REASONS: list[tuple[type[BaseException], str]] = [
    (NotReplicated, "fewer replicas of Redis confirm writes than GATEWAY_REDIS_WAIT asks for"),
    (MasterNotFoundError, "no Sentinel names a primary"),
    (ssl.SSLCertVerificationError, "the certificate of Redis is not trusted"),
    (ssl.SSLError, "Redis does not speak TLS as expected"),
    (ConnectionRefusedError, "nothing listens at the address of Redis"),
    (socket.gaierror, "the host of Redis has no address"),
    (FileNotFoundError, "the socket or a certificate file of Redis does not exist"),
    (TimeoutError, "Redis does not answer"),
    (RedisTimeoutError, "Redis does not answer"),
]


def code_of(error: BaseException | None) -> str:
    """Redis's error code, such as OOM; for a fault of the connection, the name of its type.

    `error` is what a BackboneUnavailable was raised from.
    """
    for each in _chain(error):
        for kind, name in _CODES.items():
            if isinstance(each, kind):
                return name
        if code := re.match(r"[A-Z]{2,}(?= |$)", str(each)):
            return code[0]
    return type(error).__name__


def describe(error: BaseException | None) -> str:
    """The fault as the second half of a sentence, such as `the memory of Redis is full (OOM)`."""
    code = code_of(error)
    if code in _REASONS:
        return f"{_REASONS[code]} ({code})"
    for each in _chain(error):
        for kind, reason in _CONNECTION_REASONS:
            if isinstance(each, kind):
                return reason
    return f"Redis cannot be reached ({code})"


def concerns_every_write(error: BaseException | None) -> bool:
    """Whether the server would refuse any other write, too."""
    return code_of(error) in _REASONS


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from: redis-py wraps what a connection raised."""
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
