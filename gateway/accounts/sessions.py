"""Who is logged in to the pages: account holders at /dashboard, operators at /ops.

A session is a random token in a cookie that no script can read; Redis holds its hash and whom it stands for, for
twelve hours. A log-in counts as failed until it has succeeded, so that attempts made at the same moment count too.
"""

from __future__ import annotations

import ipaddress
import secrets
from typing import Any
from urllib.parse import urlsplit

from litestar import Request
from litestar.datastructures import Cookie, State

from gateway.accounts.credentials import digest
from gateway.errors import CsrfRefused, LoginsLimited
from gateway.store import keys
from gateway.store.client import Store, backbone

ACCOUNT, OPERATOR = "capsule_session", "capsule_operator"  # the cookies
SESSION_SECONDS = 12 * 3600
FAILED_A_MINUTE = 10  # log-ins of one client address
SAFE = {"GET", "HEAD", "OPTIONS"}


class Sessions:
    def __init__(self, store: Store, base_url: str) -> None:
        self._store, self._base = store, urlsplit(base_url)

    async def open(self, subject: str) -> str:
        """The token of a new session of an account's id, or of `operator`."""
        token = secrets.token_urlsafe(32)
        with backbone():
            await self._store.client.set(keys.session_key(digest(token)), subject, ex=SESSION_SECONDS)
        return token

    async def subject(self, token: str) -> str | None:
        return await self._store.get(keys.session_key(digest(token))) if token else None

    async def close(self, token: str) -> None:
        with backbone():
            await self._store.client.delete(keys.session_key(digest(token)))

    # -- cookies ---------------------------------------------------------------------------------------------

    async def subject_of(self, request: Request[Any, Any, State], cookie: str) -> str | None:
        """Whom the request's cookie stands for. Raises CsrfRefused when another site's page may have sent it."""
        subject = await self.subject(self.token_of(request, cookie))
        if subject is not None:
            self.require_own_origin(request)
        return subject

    def token_of(self, request: Request[Any, Any, State], cookie: str) -> str:
        return request.cookies.get(self._name(cookie), "")

    def require_own_origin(self, request: Request[Any, Any, State]) -> None:
        """SameSite=Strict alone is not enough: customers' apps may be hosted under our own registrable domain, and
        are then the same site. A browser names the page's origin with every unsafe request, and no page can change it.
        """
        if request.method in SAFE:
            return
        host = request.headers.get("host", "")
        own = {f"{self._base.scheme}://{self._base.netloc}", f"{request.scope['scheme']}://{host}"}
        if request.headers.get("origin") not in own:
            raise CsrfRefused

    def cookie(self, cookie: str, token: str) -> Cookie:
        """Without a token, what makes the browser forget it."""
        return Cookie(
            key=self._name(cookie),
            value=token,
            max_age=SESSION_SECONDS if token else 0,
            path="/",
            httponly=True,
            samesite="strict",
            secure=self._base.scheme == "https",
        )

    def _name(self, cookie: str) -> str:
        # The prefix keeps a customer's app below our domain from setting a session of its own choice for us.
        return f"__Host-{cookie}" if self._base.scheme == "https" else cookie

    # -- log-ins ---------------------------------------------------------------------------------------------

    async def attempt(self, request: Request[Any, Any, State]) -> None:
        """Before a credential is looked at. Raises LoginsLimited."""
        key = keys.logins_key(digest(_client(request))[:32])
        with backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.incr(key)
                pipe.expire(key, 60, nx=True)
                pipe.ttl(key)
                failed, _, wait = await pipe.execute()
        if failed > FAILED_A_MINUTE:
            raise LoginsLimited(retry_after=wait)

    async def succeeded(self, request: Request[Any, Any, State]) -> None:
        """The attempt was not a failed one."""
        key = keys.logins_key(digest(_client(request))[:32])
        with backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.decr(key)
                pipe.expire(key, 60, nx=True)  # the minute may just have ended
                await pipe.execute()


def _client(request: Request[Any, Any, State]) -> str:
    """The address of the browser, or what the proxy in front of us says it is: else one would lock everybody out.

    Only a private address can be our proxy; from any other the header is the caller's own invention.
    """
    peer = request.client.host if request.client else ""
    told = request.headers.getall("x-forwarded-for", [])
    try:
        behind_proxy = bool(told) and ipaddress.ip_address(peer).is_private
    except ValueError:
        behind_proxy = bool(told)  # a Unix socket
    return told[-1].rpartition(",")[2].strip() if behind_proxy else peer
