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
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import httpcore
import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Reason = Literal["blocked", "dns", "connect", "tls", "timeout", "too-large", "encoded"]

LONGEST_URL = 2048


class CallFailed(httpx.TransportError):
    """No usable answer. `reason` is stable; the message may be shown to the customer.

    `connect` also stands for a connection that broke, or spoke no HTTP, before the whole answer was there.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BlockedAddress(CallFailed):
    def __init__(self, message: str) -> None:
        super().__init__("blocked", message)


class ResponseTooLarge(CallFailed):
    def __init__(self, message: str) -> None:
        super().__init__("too-large", message)


# The IANA special-purpose registries, read for the question "may a customer make us connect there", plus what
# they leave out. Written down because `ipaddress.is_global` changes between patch releases (3.11.10 and
# 3.12.4, and again for 3fff::/20), and calls multicast addresses and loopback behind NAT64 global.
NOT_PUBLIC = [
    ipaddress.ip_network(block)
    for block in (
        "0.0.0.0/8",  # "this network": Linux connects 0.0.0.0 to loopback
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT: cluster networks, Alibaba's metadata service
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a public number, but Azure's host answers it inside every virtual machine
        "169.254.0.0/16",  # link-local: the metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, Oracle's metadata service; its anycasts serve no HTTP
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays, withdrawn
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "2001::/23",  # protocol assignments: Teredo (carries an IPv4), benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: carries an IPv4, which anyone's relay connects to
        "3fff::/20",  # documentation
    )
]
# Of IPv6 only this is handed out for public use, so the rest needs no row: unspecified, loopback,
# IPv4-compatible, 64:ff9b:1::/48 (local NAT64), 100::/64 (discard), 5f00::/16 (segment routing), fc00::/7
# (unique local, metadata services), fe80::/10 (link-local), fec0::/10 (site-local), ff00::/8 (multicast).
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
# The resolver of an IPv6-only network answers with these for every name that has only IPv4.
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

# Names that only an inside resolver answers. The addresses decide in the end; this says so early and clearly.
INTERNAL_NAME = re.compile(r"(.+\.)?(localhost|localdomain|local|internal|intranet|private|corp|home|lan|home\.arpa)")
HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        elif address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in GLOBAL_V6 or address.scope_id is not None:
            return False
    return not any(address in network for network in NOT_PUBLIC)


def _judge(host: str, port: int, *, allow_private: bool) -> Address | str:
    """The host as an address or a canonical name, unless its very text tells that it is not public."""
    if not 0 < port < 65536:
        raise BlockedAddress("The port must be between 1 and 65535.")
    host = host.lower().removesuffix(".")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    valid = len(host) <= 253 and "%" not in host and (":" in host or HOST_NAME.fullmatch(host) is not None)
    address: Address | None = None
    try:
        if ":" in host:
            six = ipaddress.IPv6Address(host)
            address = six.ipv4_mapped or six
        elif NUMBER.fullmatch(host.rpartition(".")[2]):
            # Takes what the system's resolver takes: octal, hexadecimal, shortened, one whole number.
            address = ipaddress.IPv4Address(socket.inet_aton(host))
    except (ValueError, OSError):
        valid = False
    if not valid:
        raise BlockedAddress("The host is not valid; use a public host name.")
    if allow_private:
        return address or host
    if address is not None and not is_public(address):
        raise BlockedAddress(f"{address} is not a public address; use one that the internet can reach.")
    if address is None and ("." not in host or INTERNAL_NAME.fullmatch(host)):
        raise BlockedAddress(f"{host} is a name for internal use; use one that the internet can reach.")
    return address or host


def check_url(url: str, *, allow_private: bool) -> str:
    """The canonical form of an address, to be saved and called. No look-up. Raises BlockedAddress."""
    if len(url) > LONGEST_URL:
        raise BlockedAddress(f"The address is longer than {LONGEST_URL} characters; use a shorter one.")
    if not url.isprintable() or " " in url or "\\" in url:
        raise BlockedAddress("The address holds a space, a backslash or a control character; remove it.")
    try:
        # The parser that is called with later: what two parsers read differently, one of them lets through.
        parsed = httpx.URL(url)
        host, target = parsed.raw_host.decode("ascii"), parsed.raw_path.decode("ascii")
        _ = parsed.host  # decodes xn-- labels, which fails late and with another error otherwise
    except (httpx.InvalidURL, ValueError) as error:
        raise BlockedAddress("The address can't be read; write it as https://host/path.") from error
    if parsed.scheme != "https" and not (allow_private and parsed.scheme == "http"):
        raise BlockedAddress("The address must start with https://.")
    if parsed.userinfo:
        raise BlockedAddress("The address holds a user name or password; remove it.")
    if not host:
        raise BlockedAddress("The address names no host; write it as https://host/path.")
    judged = _judge(host, 443 if parsed.port is None else parsed.port, allow_private=allow_private)
    # Put together anew from what will be connected to, so that nothing that was not looked at survives.
    authority = f"[{judged}]" if isinstance(judged, ipaddress.IPv6Address) else str(judged)
    port = "" if parsed.port is None else f":{parsed.port}"
    canonical = f"{parsed.scheme}://{authority}{port}{target}"
    if len(canonical) > LONGEST_URL:
        raise BlockedAddress(f"The address is longer than {LONGEST_URL} characters; use a shorter one.")
    return canonical


def host_and_port(url: str) -> tuple[str, int]:
    """Of an address that `check_url` has passed."""
    parsed = httpx.URL(url)
    return parsed.raw_host.decode("ascii"), parsed.port or (443 if parsed.scheme == "https" else 80)


class Turns:
    """At most `total` at a time, and `each` of one key: a host that hangs must not hold up the others."""

    def __init__(self, total: int, each: int) -> None:
        self._each = each
        self._total = asyncio.Semaphore(total)
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def take(self, key: str) -> Callable[[], None]:
        """Waits for a turn; what it returns ends the turn, and is called once."""
        own = self._of.get(key)
        if own is None:
            own = self._of[key] = asyncio.Semaphore(self._each)
        await own.acquire()
        try:
            await self._total.acquire()
        except BaseException:
            own.release()
            raise

        def end() -> None:
            self._total.release()
            own.release()

        return end


# getaddrinfo has no deadline and can't be cancelled: a name whose servers don't answer holds its thread for
# half a minute. So a turn lasts as long as the thread, not as long as the caller's patience, and the names
# under one domain share a few turns: whoever owns a domain that hangs can't take them all. The operator's own names
# have turns of their own, which no customer's domain can take.
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
_own_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
LOOKUPS, LOOKUPS_OF_A_DOMAIN = 64, 4
MOST_ADDRESSES = 8


async def look_up(name: str, port: int, *, own: bool = False) -> list[str]:
    """Every address of a name, in the system's order of preference. Raises OSError."""
    loop = asyncio.get_running_loop()
    if own:
        turns = _own_lookups.setdefault(loop, Turns(LOOKUPS, LOOKUPS))
    else:
        turns = _lookups.setdefault(loop, Turns(LOOKUPS, LOOKUPS_OF_A_DOMAIN))
    end = await turns.take(".".join(name.rstrip(".").rsplit(".", 2)[-2:]))
    found: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str], error: Exception | None) -> None:
        end()
        if found.done():  # the caller has left
            return
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)

    def work() -> None:
        addresses: list[str] = []
        error: Exception | None = None
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            addresses = [str(info[4][0]) for info in infos]
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(settle, addresses, error)

    try:
        # Neither the loop's executor, which others need, nor one of our own: Python waits for an executor's
        # threads at exit, so a worker told to stop would hang with the resolver.
        threading.Thread(target=work, name="egress-lookup", daemon=True).start()
    except RuntimeError as error:
        end()
        raise OSError("no thread for a look-up") from error
    return await found


async def resolve(host: str, port: int, *, allow_private: bool, own: bool = False) -> list[tuple[str, int]]:
    """The checked addresses to connect to, as numbers that need no further look-up, best first.

    Raises CallFailed (`blocked`, `dns`). Has no deadline of its own: the caller sets one.
    """
    judged = _judge(host, port, allow_private=allow_private)
    if not isinstance(judged, str):
        return [(str(judged), port)]
    if allow_private and judged.endswith(".localhost"):
        return [("127.0.0.1", port)]  # RFC 6761 says so, and many resolvers don't
    try:
        # The final dot keeps the resolver from trying the name inside the search domains of our own network.
        found = await look_up(judged if allow_private else f"{judged}.", port, own=own)
    except (OSError, UnicodeError) as error:
        raise CallFailed("dns", f"The name {judged} can't be resolved.") from error
    addresses = list(dict.fromkeys(found))
    if not addresses:
        raise CallFailed("dns", f"The name {judged} has no address.")
    if not allow_private and not all(is_public(ipaddress.ip_address(address)) for address in addresses):
        raise BlockedAddress(f"{judged} points to an address that is not public.")
    return [(address, port) for address in addresses[:MOST_ADDRESSES]]


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
