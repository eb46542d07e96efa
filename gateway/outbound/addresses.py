"""Decides which addresses chosen by customers may be called, and resolves their names.

An address is checked twice. `check_url` checks its text when it is saved, without a look-up, so that the customer gets
a clear answer at once. `resolve` checks every address of the name at each connection and returns the addresses it has
checked. Nothing looks the name up again, so a name whose addresses change in between (DNS rebinding) gains nothing. A
name with a single address that is not public is refused as a whole.

Failure policy: closed. An address that cannot be parsed, resolved or checked is refused. Every failure is a
`CallFailed` with a stable reason. Its message names the host at most: paths and user names hold secrets, and customers
must not learn what an internal name resolves to.

httpx-secure and safehttpx rely on `ipaddress`, whose answers depend on the Python version. ssrfguard has its own
table, but bounds neither the time nor the size of an answer. Therefore the table is kept here and tested case by case.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import httpx

from gateway.outbound.public import Address, is_own_service
from gateway.outbound.public import is_public as is_public
from gateway.outbound.tenant_limiter import Turns

Reason = Literal["blocked", "dns", "connect", "tls", "timeout", "too-large", "encoded"]

LONGEST_URL = 2048  # characters
LOOKUPS = 64  # at a time
MOST_ADDRESSES = 8  # of one name


class CallFailed(Exception):
    """A call brought no usable answer. `reason` is stable; the message may be shown to the customer.

    `connect` also covers connections that break, or speak something other than HTTP, before the answer is complete.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BlockedAddress(CallFailed):
    def __init__(self, message: str) -> None:
        super().__init__("blocked", message)


# Names that only an internal resolver answers. Their addresses would be refused too; this refuses them when they are
# saved, with a clear message.
INTERNAL_NAME = re.compile(r"(.+\.)?(localhost|localdomain|local|internal|intranet|private|corp|home|lan|home\.arpa)")
HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def _check_host(host: str, port: int, *, allow_private: bool) -> Address | str:
    """Returns the host as an address or a canonical name. Raises BlockedAddress when its text is not public."""
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
            # Accepts what the system's resolver accepts: octal, hexadecimal, shortened, a single number.
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
    """Returns the canonical form of an address, to be saved and called. Looks nothing up. Raises BlockedAddress."""
    if len(url) > LONGEST_URL:
        raise BlockedAddress(f"The address is longer than {LONGEST_URL} characters; use a shorter one.")
    if not url.isprintable() or " " in url or "\\" in url:
        raise BlockedAddress("The address holds a space, a backslash or a control character; remove it.")
    try:
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
    checked = _check_host(host, 443 if parsed.port is None else parsed.port, allow_private=allow_private)
    # Rebuilt from the checked parts: the client parses the address with another library, and text that two parsers
    # read differently would reach a host that was never checked.
    authority = f"[{checked}]" if isinstance(checked, ipaddress.IPv6Address) else str(checked)
    port = "" if parsed.port is None else f":{parsed.port}"
    canonical = f"{parsed.scheme}://{authority}{port}{target}"
    if len(canonical) > LONGEST_URL:
        raise BlockedAddress(f"The address is longer than {LONGEST_URL} characters; use a shorter one.")
    return canonical


def host_and_port(url: str) -> tuple[str, int]:
    """Splits an address that `check_url` has returned."""
    parsed = httpx.URL(url)
    return parsed.raw_host.decode("ascii"), parsed.port or (443 if parsed.scheme == "https" else 80)


# getaddrinfo has no deadline and cannot be canceled: a name whose servers do not answer holds its thread for half a
# minute. Therefore a turn lasts as long as the thread, even when the caller has given up, and tenants share the turns,
# so that names that hang hold up their own tenant only. The operator's own names have separate turns, which no
# customer's name can take.
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
_own_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def look_up(name: str, port: int, *, tenant: str, own: bool = False) -> list[str]:
    """Returns every address of a name, in the system's order of preference. Raises OSError."""
    loop = asyncio.get_running_loop()
    if own:
        semaphore = _own_lookups.setdefault(loop, asyncio.Semaphore(LOOKUPS))
        await semaphore.acquire()
        end_turn: Callable[[], None] = semaphore.release
    else:
        end_turn = await _lookups.setdefault(loop, Turns(LOOKUPS)).take(tenant)
    found: asyncio.Future[list[str]] = loop.create_future()

    def finish(addresses: list[str], error: Exception | None) -> None:
        end_turn()
        if found.done():  # the caller has given up
            return
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)

    def call_resolver() -> None:
        addresses: list[str] = []
        error: Exception | None = None
        try:
            infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            addresses = [str(info[4][0]) for info in infos]
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(finish, addresses, error)

    try:
        # A thread instead of an executor: at exit Python waits for the threads of every executor, so a worker that is
        # told to stop would hang with the resolver.
        threading.Thread(target=call_resolver, name="outbound-lookup", daemon=True).start()
    except RuntimeError as error:
        end_turn()
        raise OSError("no thread for a look-up") from error
    return await found


async def resolve(
    host: str, port: int, *, tenant: str, allow_private: bool, own: bool = False
) -> list[tuple[str, int]]:
    """Returns the checked addresses to connect to, numeric, best first.

    `tenant` is the account on whose behalf it is called. `own`: the name is the operator's, so no customer can make its
    look-up hang. Raises CallFailed (`blocked`, `dns`). The caller sets the deadline.
    """
    checked = _check_host(host, port, allow_private=allow_private)
    if not isinstance(checked, str):
        if not allow_private and is_own_service(str(checked), port):
            raise BlockedAddress(f"{checked} is an address of this service itself.")
        return [(str(checked), port)]
    if allow_private and checked.endswith(".localhost"):
        return [("127.0.0.1", port)]  # RFC 6761 requires it, and many resolvers do not
    try:
        # The final dot keeps the resolver from trying the name in the search domains of our own network.
        found = await look_up(checked if allow_private else f"{checked}.", port, tenant=tenant, own=own)
    except (OSError, UnicodeError) as error:
        raise CallFailed("dns", f"The name {checked} can't be resolved.") from error
    addresses = list(dict.fromkeys(found))
    if not addresses:
        raise CallFailed("dns", f"The name {checked} has no address.")
    if not allow_private and not all(is_public(ipaddress.ip_address(address)) for address in addresses):
        raise BlockedAddress(f"{checked} points to an address that is not public.")
    if not allow_private and any(is_own_service(address, port) for address in addresses):
        raise BlockedAddress(f"{checked} points to an address of this service itself.")
    return [(address, port) for address in addresses[:MOST_ADDRESSES]]
