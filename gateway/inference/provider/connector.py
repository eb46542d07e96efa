"""Connects to a host that may have several addresses, following RFC 8305 ("Happy Eyeballs").

The addresses are tried one after the other, 250 ms apart, until one connects; the families alternate. An attempt
includes TLS, so an address that accepts connections and then hangs causes no further delay. uvloop's
`create_connection` does not support `happy_eyeballs_delay` (MagicStack/uvloop#406).

Failure policy: if no address connects, all of them are immediately tried once more, because nothing was sent yet. A
shortage on this machine, such as no free descriptor, is reported as the service's own failure, never as the host's.
"""

import asyncio
import errno
import itertools
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import structlog

from gateway.errors import BackboneUnavailable

logger = structlog.get_logger()

ATTEMPT_DELAY_SECONDS = 0.25  # after which the next address is tried too
MAX_ADDRESSES = 8  # of one host that are tried
FAMILY_SECONDS = 600.0  # for which the other family is tried first, after the preferred one did not connect
LOG_SECONDS = 1.0  # between two log lines about a shortage

P = TypeVar("P", bound=asyncio.Protocol)
Attempt = asyncio.Task[tuple[asyncio.BaseTransport, P]]
AddressInfo = tuple[Any, ...]  # as `getaddrinfo` returns it; the family comes first


class ConnectionsExhausted(BackboneUnavailable):
    message = "The service has no connection left for this request; nothing was sent or charged. Try again shortly."


class Connector(Generic[P]):
    """Connects protocols, which `make` returns, to one host."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, make: Callable[[], P]) -> None:
        self._host, self._port, self._tls, self._make = host, port, tls, make
        self._family: int | None = None  # is tried first until `_family_until`
        self._family_until = 0.0
        self._logged = 0.0

    async def connect(self) -> P:
        """Returns a connected protocol. Raises OSError or ConnectionsExhausted. Has no time limit of its own."""
        try:
            return await self._race()
        except OSError:
            return await self._race()

    async def _race(self) -> P:
        """Returns the protocol of the first address that connects, and ends the other attempts."""
        addresses = await self._resolve()
        waiting = deque(addresses)
        running: dict[Attempt[P], int] = {}  # with the address's family
        errors: list[OSError] = []
        try:
            while waiting or running:
                if waiting:
                    address = waiting.popleft()
                    running[asyncio.create_task(self._attempt(address[4]))] = address[0]
                delay = ATTEMPT_DELAY_SECONDS if waiting else None
                done, _ = await asyncio.wait(running, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
                for attempt in done:
                    family, error = running.pop(attempt), attempt.exception()
                    if error is None:
                        self._prefer(family, addresses[0][0])
                        return attempt.result()[1]
                    if not isinstance(error, OSError):
                        raise error
                    errors.append(error)
        finally:
            for attempt in running:
                attempt.add_done_callback(_discard)
                attempt.cancel()
        raise self._failure(errors)

    async def _resolve(self) -> list[AddressInfo]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise self._failure([error]) from error
        first = self._family if loop.time() < self._family_until else None
        return interleave(found, first)[:MAX_ADDRESSES]

    def _prefer(self, family: int, preferred: int) -> None:
        """Remembers the family that connected, unless it was tried first."""
        if family != preferred:
            self._family, self._family_until = family, asyncio.get_running_loop().time() + FAMILY_SECONDS

    async def _attempt(self, address: Sequence[Any]) -> tuple[asyncio.BaseTransport, P]:
        transport, protocol = await asyncio.get_running_loop().create_connection(
            self._make,
            address[0],
            address[1],
            ssl=self._tls,
            server_hostname=self._host if self._tls is not None else None,
        )
        if transport.is_closing():
            raise ConnectionResetError  # the host has closed it already; no later event would report that
        return transport, protocol

    def _failure(self, errors: list[OSError]) -> Exception:
        if not is_local_shortage(errors):
            return errors[-1]
        now = asyncio.get_running_loop().time()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.error("connections.exhausted", error=errors[-1].strerror)
        return ConnectionsExhausted()


def _discard(attempt: Attempt[Any]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        transport = attempt.result()[0]
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def interleave(found: Sequence[AddressInfo], first: int | None = None) -> list[AddressInfo]:
    """Returns the addresses with alternating families. It begins with the family `first`, if that has an address."""
    families: dict[int, list[AddressInfo]] = {}
    for address in found:
        families.setdefault(address[0], []).append(address)
    order = sorted(families, key=lambda family: family != first)  # stable, so otherwise it is the resolver's order
    rounds = itertools.zip_longest(*(families[family] for family in order))
    return [address for each in rounds for address in each if address is not None]


def is_local_shortage(errors: Iterable[BaseException]) -> bool:
    """Returns whether this machine had no descriptor, memory or local port left, so the host's state is unknown."""
    numbers = [_number(error) for error in errors if isinstance(error, OSError)]
    if any(number in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM) for number in numbers):
        return True
    # For only some of the addresses, it means that this machine has no address of their family.
    return bool(numbers) and all(number == errno.EADDRNOTAVAIL for number in numbers)


def _number(error: OSError) -> int | None:
    """Returns the error's number. A resolver without descriptors may report another error, so this checks for one."""
    if not isinstance(error, ConnectionError | TimeoutError):
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as own:
            return own.errno
    return error.errno


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, and the errors that libraries wrapped in it."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from causes(inner)
        error = error.__cause__ or error.__context__
