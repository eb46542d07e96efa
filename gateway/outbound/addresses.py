from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

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
