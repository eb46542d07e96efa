"""Sessions of the pages as requests present them: account holders at /dashboard, operators at /ops.

The token is in a cookie that scripts cannot read. Every log-in counts as failed until it succeeds, so that concurrent
attempts cannot exceed the limit.
"""

import ipaddress
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from litestar import Request
from litestar.datastructures import Cookie, State

from gateway.accounts.api_keys import digest
from gateway.accounts.session_store import SESSION_SECONDS, Person, SessionStore
from gateway.errors import CsrfRefused, LoginsLimited, RegistrationsClosed, ServiceError
from gateway.keys import logins_key, registered_key
from gateway.loops import Allowance
from gateway.redis.client import Store
from gateway.settings import Settings

ACCOUNT, OPERATOR = "capsule_session", "capsule_operator"  # cookie names
SELECT_ACCOUNT = "capsule_select_account"  # cookie name
# One address can make a tenth of a day's registrations, at least three.
REGISTRATIONS_DIVISOR, MIN_REGISTRATIONS = 10, 3
FAILED_LOGINS = Allowance(logins_key, 10, 60, error=LoginsLimited)  # per network of clients
UNREADABLE = "unreadable"  # the network of all clients whose address is reported, but is none
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


class Sessions(SessionStore):
    """The sessions, as requests present them."""

    def __init__(self, store: Store, settings: Settings) -> None:
        super().__init__(store)
        self._base = urlsplit(settings.base_url)
        self._issuer = settings.oidc_issuer

    # -- cookies ---------------------------------------------------------------------------------------------

    async def read_subject(self, request: Request[Any, Any, State], cookie: str) -> str | None:
        """Returns the subject of the request's session. Raises CsrfRefused if another site's page may have sent it."""
        subject = await self.find_subject(self.read_token(request, cookie))
        person = Person.parse(subject)
        if person is not None and person.issuer != self._issuer:
            return None
        if subject is not None:
            self.require_own_origin(request)
        return subject

    def read_token(self, request: Request[Any, Any, State], cookie: str) -> str:
        return request.cookies.get(self._cookie_name(cookie), "")

    def require_own_origin(self, request: Request[Any, Any, State], refusal: str | None = None) -> None:
        """Raises CsrfRefused for an unsafe request that does not come from a page of the service.

        SameSite=Strict is not enough: customers' apps may share the service's registrable domain, and are then the same
        site. Browsers send the page's origin with every unsafe request, and pages cannot change it.
        """
        if request.method in SAFE_METHODS:
            return
        host = request.headers.get("host", "")
        # The proxy that ends TLS speaks plain HTTP with this process. A page without TLS may be anybody's.
        scheme = "https" if self._base.scheme == "https" else request.scope["scheme"]
        own = {f"{self._base.scheme}://{self._base.netloc}", f"{scheme}://{host}"}
        if request.headers.get("origin") not in own:
            raise CsrfRefused(refusal)

    def build_cookie(
        self,
        cookie: str,
        token: str,
        *,
        seconds: int = SESSION_SECONDS,
        same_site: Literal["strict", "lax"] = "strict",
    ) -> Cookie:
        """Returns the cookie with the token. An empty token deletes the cookie."""
        return Cookie(
            key=self._cookie_name(cookie),
            value=token,
            max_age=seconds if token else 0,
            path="/",
            httponly=True,
            samesite=same_site,
            secure=self._base.scheme == "https",
        )

    def build_selection_cookies(self) -> list[Cookie]:
        """Returns the cookie with which the next sign-in asks the provider to let the person select an account.

        Without it, a provider signs in the same account again at once. None if there is no provider.
        """
        return [self.build_cookie(SELECT_ACCOUNT, SELECT_ACCOUNT, same_site="lax")] if self._issuer else []

    def _cookie_name(self, cookie: str) -> str:
        # The prefix keeps customers' apps on subdomains from setting a session cookie for the service.
        return f"__Host-{cookie}" if self._base.scheme == "https" else cookie

    # -- log-ins ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def attempt(self, request: Request[Any, Any, State]) -> AsyncGenerator[None]:
        """Wraps the check of a credential: the attempt counts as failed if the block raises.

        A failure of the service or of the identity provider does not count. Raises CsrfRefused and LoginsLimited before
        the block runs.
        """
        # Another site's page must not log a visitor in to an account of its choice.
        self.require_own_origin(request)
        network = _hash_network(request)
        await FAILED_LOGINS.count(self._store, network)
        try:
            yield
        except ServiceError as error:
            if error.status >= 500:
                await FAILED_LOGINS.take_back(self._store, network)
            raise
        await FAILED_LOGINS.take_back(self._store, network)

    async def count_registration(
        self, request: Request[Any, Any, State], per_day: int, *, anonymous: bool = False
    ) -> None:
        """Counts a registration. Raises RegistrationsClosed if this network has used up its share of the day.

        Those without a sign-in are counted apart, so that a stranger uses up nothing of the people on the same network
        who sign in.
        """
        if _is_internal(client_network(request)):  # a proxy that does not report the client
            return
        counted = f"{_hash_network(request)}{':anonymous' if anonymous else ''}"
        count, wait = await self._store.increment(registered_key(counted), 86_400)
        if count > max(MIN_REGISTRATIONS, per_day // REGISTRATIONS_DIVISOR):
            message = (
                "Your address has registered its maximum of accounts per day; try again after the time in Retry-After."
            )
            raise RegistrationsClosed(message, retry_after=wait)


def client_network(request: Request[Any, Any, State]) -> str:
    """Returns the network for which log-ins and registrations of a client are counted.

    It is an IPv4 address, or the /64 of an IPv6 address, because a provider gives each customer at least that much.
    Clients whose address a proxy reports in another form share a network. Without a report, it is that of the proxy, or
    empty for a Unix socket.
    """
    text = _read_address(request)
    if not text:
        return ""
    try:
        address = ipaddress.ip_address(_strip_port(text).partition("%")[0])
    except ValueError:
        return UNREADABLE
    # A listener for both families sees an IPv4 address as IPv6.
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ipaddress.ip_network((address, 64 if address.version == 6 else 32), strict=False))


def _read_address(request: Request[Any, Any, State]) -> str:
    """Returns the browser's address, as the proxy in front of the service reports it.

    Without the proxy's report, one client that fails to log in would lock out everybody. The header is trusted only
    from a private address, because a caller with a public address can write anything into it.
    """
    peer = request.client.host if request.client else ""
    forwarded = request.headers.getall("x-forwarded-for", [])
    try:
        behind_proxy = not peer or ipaddress.ip_address(peer).is_private
    except ValueError:
        behind_proxy = True  # a Unix socket
    reported = forwarded[-1].rpartition(",")[2].strip() if forwarded and behind_proxy else ""
    return reported or peer


def _strip_port(text: str) -> str:
    """Returns the address without the port that some proxies add, and without the brackets around IPv6."""
    if found := _ADDRESS_WITH_PORT.fullmatch(text):
        return found[1] or found[2]
    return text


_ADDRESS_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\d*)?|([\d.]+):\d*")


def _hash_network(request: Request[Any, Any, State]) -> str:
    return digest(client_network(request))[:32]


def _is_internal(network: str) -> bool:
    return network != UNREADABLE and not (network and ipaddress.ip_network(network).is_global)
