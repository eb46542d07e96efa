"""POSTs to addresses that customers chose, many a second, by the rules of `egress`.

aiohttp's client takes a fifth of the processor time of httpx's for this. It asks our resolver for every name, connects
to the very addresses that were judged, and each is judged once more where its socket is made.

Nothing is sent twice, so a POST that meets a connection which the receiver is just closing has failed. Hence idle
connections are kept for less time than servers keep them: Node, uvicorn and Apache close theirs after 5 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import aiohttp
from aiohttp import abc
from yarl import URL

from gateway.outbound.addresses import BlockedAddress, CallFailed, check_url, host_and_port, is_public, resolve
from gateway.outbound.client import tls_context

KEEP_ALIVE = 4.0  # seconds an idle connection is kept


class _Resolver(abc.AbstractResolver):
    """aiohttp connects to what this returns, and asks for every name; literals `check_url` has judged."""

    def __init__(self, *, allow_private: bool) -> None:
        self._allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[abc.ResolveResult]:
        return [
            {
                "hostname": host,
                "host": address,
                "port": number,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address, number in await resolve(host, port, allow_private=self._allow_private)
        ]

    async def close(self) -> None:
        pass


class Poster:
    def __init__(self, *, allow_private: bool, ca_file: str | None = None, connections: int = 2_048) -> None:
        self._allow_private, self._ca_file, self._connections = allow_private, ca_file, connections
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        def judged(info: Any) -> socket.socket:  # the last look before the connection
            family, kind, proto, _, address = info
            if not self._allow_private and not is_public(ipaddress.ip_address(str(address[0]))):
                raise BlockedAddress("The receiver points to an address that is not public.")
            return socket.socket(family, kind, proto)

        connector = aiohttp.TCPConnector(
            resolver=_Resolver(allow_private=self._allow_private),
            socket_factory=judged,
            ssl=tls_context(self._ca_file),
            limit=self._connections,
            limit_per_host=0,  # accounts may share a host; how much one account gets is the sender's affair
            use_dns_cache=False,
            keepalive_timeout=KEEP_ALIVE,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "capsule-gateway"},
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            trust_env=False,
        )

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, budget: float, most: int) -> int:
        """The status, once the headers are there within `budget` seconds. Raises CallFailed.

        Of the response's body at most `most` bytes are read, within what is left of the budget.
        """
        if self._session is None:
            self._session = self._open()
        host, address = _read(url, self._allow_private)
        status = 0
        try:
            with _failures(host):
                async with (
                    asyncio.timeout(budget),
                    self._session.post(address, headers=headers, data=body, allow_redirects=False) as answer,
                ):
                    status = answer.status
                    left = most
                    while left > 0 and (part := await answer.content.read(left)):
                        left -= len(part)
                    if left <= 0:
                        answer.close()
        except CallFailed:
            if not status:
                raise
        return status

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


@lru_cache(maxsize=4_096)
def _read(url: str, allow_private: bool) -> tuple[str, URL]:
    """Host and address. Kept, because judging a text takes a fifth of a delivery; names are looked up each time."""
    url = check_url(url, allow_private=allow_private)
    return host_and_port(url)[0], URL(url, encoded=True)


@contextlib.contextmanager
def _failures(host: str) -> Iterator[None]:
    try:
        yield
    except CallFailed:
        raise
    except TimeoutError as error:
        raise CallFailed("timeout", f"{host} did not answer in time.") from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise CallFailed("tls", f"TLS with {host} failed.") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise CallFailed("connect", f"{host} could not be reached, or broke the connection.") from error
