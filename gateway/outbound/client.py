"""The HTTP client for all addresses of customers: key sets, app backends, receivers and probes.

It is a restricted aiohttp client. `addresses.resolve` resolves every name, and every address is checked again when its
socket is created. The budget of a call covers the lookup, the connection and the response up to the last byte that is
read. Redirects are returned, not followed. Cookies, proxies and `.netrc` are ignored. `fetch` reads gzip, which some
servers send unasked, and its limit counts the bytes after decompression. The number of concurrent calls is limited, in
total and per origin. Tenants share the calls of `fetch` and all lookups (`tenant_limiter.py`), so that no tenant's
origins or names can delay the calls of another tenant.

Failure policy: every failure is a `CallFailed`, whose message never contains the address. No request is sent twice: a
request on a connection that the server is just closing fails.
"""

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, Self

import aiohttp
import httpx
from aiohttp import abc
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import LineTooLong
from yarl import URL

from gateway.outbound.addresses import BlockedAddress, CallFailed, check_url, host_and_port, is_public, resolve
from gateway.outbound.public import is_own_service
from gateway.outbound.tenant_limiter import TenantLimiter

KEEP_ALIVE_SECONDS = 4.0  # Node, uvicorn and Apache close idle connections after 5
MAX_HEADERS = 64  # of a response; with aiohttp's limit of 8,190 bytes for each, at most half a MiB
DRAIN_SECONDS = 1.0  # that a body may take of which only the beginning is kept
GZIP = {"gzip", "x-gzip"}
Resolve = Callable[..., Awaitable[list[tuple[str, int]]]]  # as `addresses.resolve`
FAILURES = (aiohttp.ClientError, OSError, ValueError)  # of aiohttp; TimeoutError is an OSError

_tenant: ContextVar[str] = ContextVar("tenant")  # of the current call; aiohttp passes nothing on to its resolver


class ResponseTooLarge(CallFailed):
    def __init__(self, message: str) -> None:
        super().__init__("too-large", message)


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]  # by name in any case
    body: bytes


class Client:
    """A client for the addresses of customers. Every call names its `tenant`, the account for which it is made.

    The authorities in `ca_file` are trusted beside the public ones. `connections` limits the concurrent calls. Set
    `connections_per_origin` to 0 for no limit, and `keep_alive` to False for a new connection per call. With `own`, all
    names are the operator's, whose lookups customers' names cannot delay. With `own_domain`, this applies to the names
    under that domain. `resolve` returns the checked addresses of a name.
    """

    def __init__(
        self,
        *,
        allow_private: bool,
        ca_file: str | None = None,
        connections: int = 512,
        connections_per_origin: int = 32,
        keep_alive: bool = True,
        own: bool = False,
        own_domain: str = "",
        resolve: Resolve = resolve,
    ) -> None:
        self._allow_private, self._own, self._own_domain = allow_private, own, own_domain
        self._limiter = TenantLimiter(connections)
        self._connections, self._connections_per_origin = connections, connections_per_origin
        self._keep_alive, self._resolve = keep_alive, resolve
        self._tls = _read_authorities(ca_file)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        tenant: str,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        budget: float,
        max_bytes: int,
    ) -> Response:
        """Returns the complete response. Raises CallFailed if its body is late, truncated or too large.

        A body that is compressed with gzip is decompressed; another encoding fails. `max_bytes` limits both forms.

        `budget` is in seconds.
        """
        host, target = _parse(url, self._allow_private)
        try:
            async with (
                asyncio.timeout(budget),
                self._slot(tenant),
                self._request(tenant, method, target, headers, content) as response,
            ):
                encodings = {each.lower() for each in response.headers.getall("Content-Encoding", [])} - {"identity"}
                if encodings - GZIP:
                    raise CallFailed("encoded", f"{host} sent a compressed response; send it uncompressed.")
                body = await _read(response, max_bytes + 1)
                if encodings and len(body) <= max_bytes:
                    body = _decompress(host, body, max_bytes + 1)
                if len(body) > max_bytes:
                    raise ResponseTooLarge(f"{host} sent a response of more than {max_bytes} bytes.")
                return Response(response.status, response.headers, body)
        except FAILURES as error:
            raise _call_failed(host, error) from error

    async def send(
        self,
        method: str,
        url: str,
        *,
        tenant: str,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        budget: float,
        drain_bytes: int = 0,
        keep_bytes: int = 0,
    ) -> Response:
        """Returns the response once its headers have arrived, with the first `keep_bytes` of its body.

        A body of fewer than `drain_bytes` is read within DRAIN_SECONDS and the budget (seconds), so that the connection
        can be reused. A late, truncated or longer body closes the connection, but the call succeeds. Raises CallFailed.
        """
        host, target = _parse(url, self._allow_private)
        result: Response | None = None
        body = bytearray()
        try:
            async with (
                asyncio.timeout(budget),
                self._request(tenant, method, target, headers, content) as response,
            ):
                result = Response(response.status, response.headers, b"")
                async with asyncio.timeout(DRAIN_SECONDS):
                    await _drain(response, drain_bytes, body, keep_bytes)
        except FAILURES as error:
            if result is None:
                raise _call_failed(host, error) from error
        return result._replace(body=bytes(body)) if body else result

    @contextlib.asynccontextmanager
    async def _slot(self, tenant: str) -> AsyncIterator[None]:
        release = await self._limiter.acquire(tenant)
        try:
            yield
        finally:
            release()

    def _request(
        self, tenant: str, method: str, target: URL, headers: Mapping[str, str] | None, content: bytes | None
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        _tenant.set(tenant)
        if self._session is None:
            self._session = self._open_session()
        return self._session.request(method, target, headers=headers, data=content, allow_redirects=False)

    def _is_own(self, host: str) -> bool:
        return self._own or (self._own_domain != "" and host.rstrip(".").endswith(f".{self._own_domain}"))

    def _open_session(self) -> aiohttp.ClientSession:
        """Opens aiohttp's session, which needs a running event loop, unlike the client itself."""
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self._resolve, allow_private=self._allow_private, is_own=self._is_own),
            socket_factory=_open_any_socket if self._allow_private else _open_public_socket,
            ssl=self._tls,
            limit=self._connections,
            limit_per_host=self._connections_per_origin,
            use_dns_cache=False,
            keepalive_timeout=KEEP_ALIVE_SECONDS if self._keep_alive else None,
            force_close=not self._keep_alive,
        )
        connector._factory = functools.partial(_Protocol, asyncio.get_running_loop())  # type: ignore[assignment]
        headers = {"Accept-Encoding": "identity", "User-Agent": "capsule-gateway"}
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers if self._keep_alive else {**headers, "Connection": "close"},
            skip_auto_headers=["Content-Type"],
            timeout=aiohttp.ClientTimeout(),
            middlewares=[_send_once],
            max_headers=MAX_HEADERS,
            auto_decompress=False,
            trust_env=False,
        )


class _Protocol(ResponseHandler):
    """Lets the head of a response count, whatever follows it.

    aiohttp parses all bytes that arrive together, and a fault in the body would lose the head before it. A write that
    fails would also hide why the connection broke.
    """

    _HEAD_END = re.compile(rb"\n\r?\n")
    _awaits_head = True
    _seen = b""  # the last bytes of an incomplete head, which may be a part of its end

    def set_response_params(self, **params: Any) -> None:
        self._awaits_head = True
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        self._awaits_head = data[0].code < 200  # an interim response
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        while self._awaits_head and data:
            end = self._HEAD_END.search(self._seen + data)
            if end is None:
                self._seen = (self._seen + data)[-2:]
                break
            length = end.end() - len(self._seen)
            self._seen = b""
            super().data_received(data[:length])
            data = data[length:]
            if not data or self._exception is not None:
                return
        super().data_received(data)

    def set_exception(self, exc: Any, *cause: Any) -> None:
        payload = self._payload
        if self._exception is None:
            super().set_exception(exc, *cause)
        if payload is not None and not payload.is_eof():  # a reader would wait for the end of its budget
            payload.set_exception(aiohttp.ClientPayloadError("the body broke"), exc)


class _Resolver(abc.AbstractResolver):
    """Returns checked addresses to aiohttp for every name. `check_url` has checked literal addresses."""

    def __init__(self, resolve: Resolve, *, allow_private: bool, is_own: Callable[[str], bool]) -> None:
        self._resolve, self._allow_private, self._is_own = resolve, allow_private, is_own

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[abc.ResolveResult]:
        found = await self._resolve(
            host, port, tenant=_tenant.get(), allow_private=self._allow_private, own=self._is_own(host)
        )
        return [
            {
                "hostname": host,
                "host": address,
                "port": number,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address, number in found
        ]

    async def close(self) -> None:
        pass


class _NotPublic(OSError):
    """An OSError, so that aiohttp tries the next address."""


def _open_any_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = info
    return socket.socket(family, kind, protocol)


def _open_public_socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """Checks the address once more, independently of what aiohttp did with the name."""
    address, port = str(info[4][0]), int(info[4][1])
    if not is_public(ipaddress.ip_address(address)) or is_own_service(address, port):
        raise _NotPublic("not a public address")
    return _open_any_socket(info)


@lru_cache
def _read_authorities(ca_file: str | None) -> ssl.SSLContext:
    """Returns one context for all clients of a process, because reading the public authorities takes 50 ms."""
    context = httpx.create_ssl_context(trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


async def _send_once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Hides a broken connection from aiohttp, which would otherwise repeat requests with an idempotent method."""
    try:
        return await handler(request)
    except FAILURES as error:
        raise _call_failed(request.url.raw_host or "", error) from error


def _call_failed(host: str, error: BaseException) -> CallFailed:
    if isinstance(error, TimeoutError):
        return CallFailed("timeout", f"{host} did not answer in time.")
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, _NotPublic):
        return BlockedAddress(f"{host} points to an address that is not public.")
    for each in (error.__cause__, error):
        if isinstance(each, ssl.SSLError):
            detail = getattr(each, "verify_message", None) or "the handshake failed"
            return CallFailed("tls", f"TLS with {host} failed: {detail}.")
    if _has_large_head(error):
        return ResponseTooLarge(f"{host} sent more than {MAX_HEADERS} headers, or one that is too long.")
    return CallFailed("connect", f"{host} could not be reached, or closed the connection.")


def _has_large_head(error: BaseException) -> bool:
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, LineTooLong) or "Too many headers" in str(error)


def _decompress(host: str, body: bytes, max_bytes: int) -> bytes:
    """Returns at most the first `max_bytes`: a gigabyte of zeros is a megabyte on the wire. Raises CallFailed."""
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = decompressor.decompress(body, max_bytes)
    except zlib.error:
        text = b""
    if len(text) < max_bytes and (not decompressor.eof or decompressor.unused_data):
        raise CallFailed("encoded", f"{host} sent a response that is not valid gzip.")
    return text


@lru_cache(maxsize=4_096)
def _parse(url: str, allow_private: bool) -> tuple[str, URL]:
    """Returns the host and the checked address. Cached, because parsing takes a fifth of a delivery's time."""
    url = check_url(url, allow_private=allow_private)
    return host_and_port(url)[0], URL(url, encoded=True)


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < max_bytes and (part := await response.content.read(max_bytes - len(body))):
        body += part
    return bytes(body)


async def _drain(response: aiohttp.ClientResponse, max_bytes: int, body: bytearray, keep_bytes: int) -> None:
    """Reads up to `max_bytes` of the body and appends its first `keep_bytes` to `body`."""
    while max_bytes > 0 and (part := await response.content.read(max_bytes)):
        max_bytes -= len(part)
        if len(body) < keep_bytes:
            body += part[: keep_bytes - len(body)]
