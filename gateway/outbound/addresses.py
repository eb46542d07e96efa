"""Decides which addresses of customers may be called, and resolves their names.

An address is checked twice. `check_url` checks its text when it is saved, without a lookup, so that the customer gets a
clear message at once. `resolve` checks every address of the name at each connection and returns the checked addresses.
Nothing looks up the name again, so a name whose addresses change in between (DNS rebinding) gains nothing. If one
address of a name is not public, the whole name is refused.

Failure policy: closed. An address that cannot be parsed, resolved or checked is refused. Every failure is a
`CallFailed` with a stable reason. Its message names at most the host, because paths and user names may contain secrets
and customers must not learn what an internal name resolves to.

The table of public networks is kept here and tested case by case. httpx-secure and safehttpx rely on `ipaddress`, whose
results depend on the Python version. ssrfguard has its own table, but limits neither the time nor the response's size.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Literal
from weakref import WeakKeyDictionary

import httpx

from gateway.outbound.public import Address, is_own_service
from gateway.outbound.public import is_public as is_public
from gateway.outbound.tenant_limiter import TenantLimiter

Reason = Literal["blocked", "dns", "connect", "tls", "timeout", "too-large", "encoded"]

LookUp = Callable[..., Awaitable[list[str]]]  # as `look_up`

URL_CHARACTERS = 2048
MAX_LOOKUPS = 64  # concurrent
MAX_ADDRESSES = 8  # of one name


class CallFailed(Exception):
    """A call without a usable response. `reason` is stable; the message may be shown to the customer.

    The reason `connect` also covers connections that break, or do not speak HTTP, before the response is complete.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BlockedAddress(CallFailed):
    def __init__(self, message: str) -> None:
        super().__init__("blocked", message)


# Names that only an internal resolver knows. Their addresses would be refused anyway; this refuses the names when they
# are saved, with a clear message.
INTERNAL_NAME = re.compile(r"(.+\.)?(localhost|localdomain|local|internal|intranet|private|corp|home|lan|home\.arpa)")
# Names that the DNS of the internet never has (RFC 6761, 7686, 9476). Tests and documentation use `example`.
SPECIAL_USE_NAME = re.compile(r"(.+\.)?(test|invalid|onion|alt|arpa)")
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
            # Accepts all forms that the system's resolver accepts: octal, hexadecimal, shortened, a single number.
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
    """Returns the canonical form of an address, to save and to call. Does no lookup. Raises BlockedAddress."""
    if len(url) > URL_CHARACTERS:
        raise BlockedAddress(f"The address is longer than {URL_CHARACTERS} characters; use a shorter one.")
    if not url.isprintable() or " " in url or "\\" in url:
        raise BlockedAddress("The address contains a space, a backslash or a control character; remove it.")
    try:
        parsed = httpx.URL(url)
        host, target = parsed.raw_host.decode("ascii"), parsed.raw_path.decode("ascii")
        _ = parsed.host  # decodes xn-- labels, which fails late and with another error otherwise
    except (httpx.InvalidURL, ValueError) as error:
        raise BlockedAddress("The address cannot be parsed; write it as https://host/path.") from error
    if parsed.scheme != "https" and not (allow_private and parsed.scheme == "http"):
        raise BlockedAddress("The address must start with https://.")
    if parsed.userinfo:
        raise BlockedAddress("The address contains a user name or password; remove it.")
    if not host:
        raise BlockedAddress("The address has no host; write it as https://host/path.")
    checked = _check_host(host, 443 if parsed.port is None else parsed.port, allow_private=allow_private)
    # Rebuilt from the checked parts: the client parses the address with another library, and if the two parsers
    # disagreed, the call would reach a host that was never checked.
    authority = f"[{checked}]" if isinstance(checked, ipaddress.IPv6Address) else str(checked)
    port = "" if parsed.port is None else f":{parsed.port}"
    canonical = f"{parsed.scheme}://{authority}{port}{target}"
    if len(canonical) > URL_CHARACTERS:
        raise BlockedAddress(f"The address is longer than {URL_CHARACTERS} characters; use a shorter one.")
    return canonical


def is_internal(url: str) -> bool:
    """Returns whether the address is well-formed, but its host is not public. Does no lookup."""
    try:
        host, port = host_and_port(check_url(url, allow_private=True))
    except BlockedAddress:
        return False
    try:
        _check_host(host, port, allow_private=False)
    except BlockedAddress:
        return True
    return False


def host_and_port(url: str) -> tuple[str, int]:
    """Splits an address that `check_url` has returned."""
    parsed = httpx.URL(url)
    return parsed.raw_host.decode("ascii"), parsed.port or (443 if parsed.scheme == "https" else 80)


# getaddrinfo has no deadline and cannot be canceled: a name whose servers do not answer blocks its thread for half a
# minute. So a slot is held as long as the thread runs, even if the caller is canceled. Tenants share the slots, so that
# names that hang block only their own tenant. The operator's own names have separate slots.
_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, TenantLimiter] = WeakKeyDictionary()
_own_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def look_up(name: str, port: int, *, tenant: str, own: bool = False) -> list[str]:
    """Returns every address of a name, in the system's order of preference. Raises OSError."""
    loop = asyncio.get_running_loop()
    if own:
        semaphore = _own_lookups.setdefault(loop, asyncio.Semaphore(MAX_LOOKUPS))
        await semaphore.acquire()
        release: Callable[[], None] = semaphore.release
    else:
        release = await _lookups.setdefault(loop, TenantLimiter(MAX_LOOKUPS)).acquire(tenant)
    found: asyncio.Future[list[str]] = loop.create_future()

    def finish(addresses: list[str], error: Exception | None) -> None:
        release()
        if found.done():  # the caller was canceled
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
        # A thread instead of an executor: at exit, Python waits for the threads of every executor, so a worker that
        # stops would hang with the resolver.
        threading.Thread(target=call_resolver, name="outbound-lookup", daemon=True).start()
    except RuntimeError as error:
        release()
        raise OSError("no thread for a lookup") from error
    return await found


async def resolve(
    host: str, port: int, *, tenant: str, allow_private: bool, own: bool = False, look_up: LookUp = look_up
) -> list[tuple[str, int]]:
    """Returns the checked numeric addresses to connect to, best first.

    `tenant` is the account for which the call is made. `own` marks a name of the operator, whose lookup customers
    cannot delay. `look_up` asks the DNS. Raises CallFailed (`blocked`, `dns`). The caller sets the deadline.
    """
    checked = _check_host(host, port, allow_private=allow_private)
    if not isinstance(checked, str):
        if not allow_private and is_own_service(str(checked), port):
            raise BlockedAddress(f"{checked} is an address of this service.")
        return [(str(checked), port)]
    if allow_private and checked.endswith(".localhost"):
        return [("127.0.0.1", port)]  # RFC 6761 requires it, but many resolvers do not do it
    try:
        # The final dot keeps the resolver from trying the name in the search domains of our own network.
        found = await look_up(checked if allow_private else f"{checked}.", port, tenant=tenant, own=own)
    except (OSError, UnicodeError) as error:
        raise CallFailed("dns", f"The name {checked} cannot be resolved.") from error
    addresses = list(dict.fromkeys(found))
    if not addresses:
        raise CallFailed("dns", f"The name {checked} has no address.")
    if not allow_private and not all(is_public(ipaddress.ip_address(address)) for address in addresses):
        raise BlockedAddress(f"{checked} points to an address that is not public.")
    if not allow_private and any(is_own_service(address, port) for address in addresses):
        raise BlockedAddress(f"{checked} points to an address of this service.")
    return [(address, port) for address in addresses[:MAX_ADDRESSES]]
