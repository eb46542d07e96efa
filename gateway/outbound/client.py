"""The one way to call an address a customer chose: key sets, app backends, receivers, probes, repositories.

An address is judged twice. `check_url` judges its text when it is saved, without a look-up, so that a person
gets a clear answer at once. `resolve` judges every address of the name at each connection and hands out the
very addresses it judged: nothing looks the name up again, so a name that changes in between (DNS rebinding)
gains nothing. A name with a single address that is not public is refused whole.

Failure policy: closed. What can't be read, looked up or judged is refused. Every failure is a `CallFailed`
with a stable reason and a message fit for the customer, which names the host at most: paths and user names
hold secrets, and what an internal name resolves to is not theirs to learn.

Packages looked at: httpx-secure and safehttpx judge by `ipaddress`, whose answer depends on the Python
version; ssrfguard has its own table, but leaves the deadline over the whole call and the bound on the body to
its caller. Hence owned, with the table of cases in its tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import httpcore
import httpx

from gateway.outbound.addresses import (
    BlockedAddress,
    CallFailed,
    Turns,
    check_url,
    resolve,
)


class ResponseTooLarge(CallFailed):
    def __init__(self, message: str) -> None:
        super().__init__("too-large", message)


@contextlib.contextmanager
def _failures(host: str) -> Iterator[None]:
    """httpcore's errors, and what it lets through of anyio's and ssl's, as ours."""
    try:
        yield
    except (TimeoutError, httpcore.TimeoutException) as error:
        raise CallFailed("timeout", f"{host} did not answer in time.") from error
    except ssl.SSLError as error:
        raise CallFailed("tls", f"TLS with {host} failed.") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise CallFailed("connect", f"{host} broke the connection, or does not speak HTTP.") from error


KEEP_ALIVE = 15.0  # seconds an idle connection is kept
CONNECTIONS_TO_AN_ORIGIN = 32


class Body(httpx.AsyncByteStream):
    def __init__(self, host: str, parts: AsyncIterable[bytes], done: Callable[[], Awaitable[None]]) -> None:
        self._host, self._parts, self._done = host, parts, done

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _failures(self._host):
            async for part in self._parts:
                yield part

    async def aclose(self) -> None:
        await self._done()


class Transport(httpx.AsyncBaseTransport):
    """httpcore's HTTP/1.1 over connections made and kept here.

    httpx.AsyncHTTPTransport takes no network backend, and httpcore's pool, which does, loses a place for good
    when a request is cancelled while it waits for one (encode/httpcore#1093). Cancelling is what a budget
    does, and receivers that hang are the rule here. Connecting in this class also leaves no other way to
    connect: no proxy, no unix socket, no second look-up.
    """

    def __init__(self, *, allow_private: bool, tls: ssl.SSLContext, connections: int, own: bool) -> None:
        self._allow_private, self._own = allow_private, own
        self._tls = tls
        self._turns = Turns(connections, connections if own else CONNECTIONS_TO_AN_ORIGIN)
        self._most_idle = connections
        self._idle: list[httpcore.AsyncHTTP11Connection] = []  # the longest idle first
        self._tcp = httpcore.AnyIOBackend()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, timeouts = request.url, request.extensions.get("timeout", {})
        if url.scheme != "https" and not (self._allow_private and url.scheme == "http"):
            raise BlockedAddress("The address must start with https://.")
        host, port = url.raw_host.decode("ascii"), url.port
        if port is None:
            port = 443 if url.scheme == "https" else 80
        origin = httpcore.Origin(url.raw_scheme, url.raw_host, port)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        connection = None
        with _failures(host):
            async with asyncio.timeout(timeouts.get("pool")):
                end = await self._turns.take(str(origin))
            try:
                connection = await self._reuse(origin) or await self._connect(origin, timeouts.get("connect"))
                answer = await connection.handle_async_request(
                    httpcore.Request(
                        request.method,
                        httpcore.URL(scheme=origin.scheme, host=origin.host, port=port, target=url.raw_path),
                        headers=request.headers.raw,
                        content=request.stream,
                        extensions={"timeout": timeouts},
                    )
                )
            except BaseException:
                end()
                if connection is not None:
                    await connection.aclose()
                raise
        kept = connection

        async def done() -> None:
            try:
                await answer.aclose()
            finally:
                end()
                await self._keep(kept)

        assert isinstance(answer.stream, AsyncIterable)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=Body(host, answer.stream, done), request=request
        )

    async def _reuse(self, origin: httpcore.Origin) -> httpcore.AsyncHTTP11Connection | None:
        while found := next((one for one in reversed(self._idle) if one.can_handle_request(origin)), None):
            self._idle.remove(found)
            if not found.has_expired():
                return found
            await found.aclose()
        return None

    async def _keep(self, connection: httpcore.AsyncHTTP11Connection) -> None:
        if connection.is_idle():
            self._idle.append(connection)
        else:
            await connection.aclose()
        while self._idle and (len(self._idle) > self._most_idle or self._idle[0].has_expired()):
            await self._idle.pop(0).aclose()

    async def _connect(self, origin: httpcore.Origin, seconds: float | None) -> httpcore.AsyncHTTP11Connection:
        """`seconds` is for look-up, TCP and TLS together."""
        host = origin.host.decode("ascii").removesuffix(".")
        async with asyncio.timeout(seconds) as limit:
            addresses = await resolve(host, origin.port, allow_private=self._allow_private, own=self._own)
            stream = await self._dial(host, addresses, limit.when())
            if origin.scheme == b"https":
                try:
                    stream = await stream.start_tls(self._tls, server_hostname=host)
                except BaseException as error:
                    await stream.aclose()  # httpcore leaves it open when it is cancelled
                    if isinstance(error, httpcore.ConnectError):
                        told = getattr(error.__cause__, "verify_message", None) or "the handshake broke off"
                        raise CallFailed("tls", f"TLS with {host} failed: {told}.") from error
                    raise
        return httpcore.AsyncHTTP11Connection(origin, stream, keepalive_expiry=KEEP_ALIVE)

    async def _dial(
        self, host: str, addresses: list[tuple[str, int]], deadline: float | None
    ) -> httpcore.AsyncNetworkStream:
        clock = asyncio.get_running_loop().time
        for left, (address, port) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            # An equal share of what is left: an address that swallows packets must leave time for the next.
            share = None if deadline is None else max(deadline - clock(), 0.0) / left
            try:
                return await self._tcp.connect_tcp(address, port, timeout=share)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                if left == 1 and isinstance(error, httpcore.ConnectError):
                    raise CallFailed("connect", f"{host} could not be reached.") from error
                if left == 1:
                    raise
        raise AssertionError("resolve returned no address")

    async def aclose(self) -> None:
        self._most_idle = 0
        while self._idle:
            await self._idle.pop().aclose()


class Client(httpx.AsyncClient):
    """Made by `client`; `fetch` is the call to prefer, since this one reads any amount for any time."""

    def __init__(self, transport: Transport, *, allow_private: bool, timeout: httpx.Timeout | float) -> None:
        headers = {"Accept-Encoding": "identity", "User-Agent": "capsule-gateway"}
        super().__init__(transport=transport, trust_env=False, timeout=timeout, headers=headers)
        self.allow_private = allow_private
        self._direct = transport

    async def send(self, request: httpx.Request, *, stream: bool = False, **_: Any) -> httpx.Response:
        """Past httpx's own send, which follows redirects when asked to and parses their address when not,
        keeps cookies, and logs the whole address at level info."""
        response = await self._direct.handle_async_request(request)
        if not stream:
            try:
                await response.aread()
            except BaseException:
                await response.aclose()
                raise
        return response


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    tls = httpx.create_ssl_context(trust_env=False)
    tls.set_alpn_protocols(["http/1.1"])
    if ca_file is not None:
        tls.load_verify_locations(ca_file)
    return tls


def client(
    *,
    allow_private: bool,
    ca_file: str | None = None,
    timeout: httpx.Timeout | float = 5.0,
    connections: int = 256,
    own: bool = False,
) -> Client:
    """`ca_file` is trusted beside the public authorities, `timeout` is for each step, in seconds, and
    `connections` bounds the requests under way, and the idle connections kept. `own`: the names are the operator's,
    under one domain and perhaps at one address, so that they need not share."""
    transport = Transport(allow_private=allow_private, tls=tls_context(ca_file), connections=connections, own=own)
    return Client(transport, allow_private=allow_private, timeout=timeout)


class Answer(NamedTuple):
    status: int
    headers: httpx.Headers
    body: bytes


async def fetch(
    client: Client,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    budget: float,
    max_bytes: int,
    whole: bool = True,
) -> Answer:
    """One call within `budget` seconds, from the look-up to the last byte. Raises CallFailed.

    With `whole`, a body that is longer than `max_bytes`, late, cut or compressed is a failure. Without, the
    status is what counts, and whatever came of the body until then is returned.
    """
    url = check_url(url, allow_private=client.allow_private)
    request = client.build_request(method, url, headers=headers, content=content)
    host, response, body = request.url.host, None, bytearray()
    try:
        with _failures(host):
            async with asyncio.timeout(budget):
                response = await client.send(request, stream=True)
                try:
                    # Never inflated: a gigabyte of zeros is a megabyte on the wire.
                    if whole and response.headers.get("content-encoding", "identity") != "identity":
                        raise CallFailed("encoded", f"{host} sent a compressed answer; send it uncompressed.")
                    async for part in response.aiter_raw():
                        body += part
                        if len(body) > max_bytes:
                            raise ResponseTooLarge(f"{host} answered with more than {max_bytes} bytes.")
                finally:
                    await response.aclose()
    except CallFailed:
        if whole or response is None:
            raise
    return Answer(response.status_code, response.headers, bytes(body[:max_bytes]))
