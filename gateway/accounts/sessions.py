"""Browser sessions: account holders at /dashboard, operators at /ops.

A session is a random token in a cookie that scripts cannot read. For twelve hours, Redis keeps the token's hash and
the session's subject: the API key that opened it, or a fingerprint of the operator token. A session ends with its key.

Every log-in counts as failed until it has succeeded, so that concurrent attempts cannot get past the limit.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from litestar import Request
from litestar.datastructures import Cookie, State

from gateway.accounts.credentials import digest
from gateway.errors import CsrfRefused, LoginsLimited
from gateway.store import keys
from gateway.store.client import Store, backbone

ACCOUNT, OPERATOR = "capsule_session", "capsule_operator"  # cookie names
SESSION_SECONDS = 12 * 3600
FAILED_A_MINUTE = 10  # log-ins per client address
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


class Sessions:
    def __init__(self, store: Store, base_url: str) -> None:
        self._store, self._base = store, urlsplit(base_url)

    async def open(self, subject: str) -> str:
        """Returns the token of a new session."""
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
        """Returns the subject of the request's session. Raises CsrfRefused if another site's page may have sent it."""
        subject = await self.subject(self.token_of(request, cookie))
        if subject is not None:
            self.require_own_origin(request)
        return subject

    def token_of(self, request: Request[Any, Any, State], cookie: str) -> str:
        return request.cookies.get(self._cookie_name(cookie), "")

    def require_own_origin(self, request: Request[Any, Any, State]) -> None:
        """Raises CsrfRefused for an unsafe request that does not come from a page of the service itself.

        SameSite=Strict alone is not enough: customers' apps may share the service's registrable domain, which makes
        them the same site. Browsers send the page's origin with every unsafe request, and pages cannot change it.
        """
        if request.method in SAFE_METHODS:
            return
        host = request.headers.get("host", "")
        own = {f"{self._base.scheme}://{self._base.netloc}", f"{request.scope['scheme']}://{host}"}
        if request.headers.get("origin") not in own:
            raise CsrfRefused

    def cookie(self, cookie: str, token: str) -> Cookie:
        """Returns the cookie that holds the token. An empty token deletes the cookie."""
        return Cookie(
            key=self._cookie_name(cookie),
            value=token,
            max_age=SESSION_SECONDS if token else 0,
            path="/",
            httponly=True,
            samesite="strict",
            secure=self._base.scheme == "https",
        )

    def _cookie_name(self, cookie: str) -> str:
        # The prefix keeps customers' apps on subdomains from setting a session cookie for the service.
        return f"__Host-{cookie}" if self._base.scheme == "https" else cookie

    # -- log-ins ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def attempt(self, request: Request[Any, Any, State]) -> AsyncGenerator[None]:
        """Checks a credential in its body: the attempt counts as failed unless the body ends without an error.

        Raises CsrfRefused and LoginsLimited before the body runs.
        """
        # Another site's page must not log a visitor in to an account of its own choice.
        self.require_own_origin(request)
        key = keys.logins_key(digest(client_address(request))[:32])
        await self._count_attempt(key)
        yield
        await self._uncount_attempt(key)

    async def _count_attempt(self, key: str) -> None:
        with backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.incr(key)
                pipe.expire(key, 60, nx=True)
                pipe.ttl(key)
                failed, _, wait = await pipe.execute()
        if failed > FAILED_A_MINUTE:
            raise LoginsLimited(retry_after=wait)

    async def _uncount_attempt(self, key: str) -> None:
        with backbone():
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.decr(key)
                pipe.expire(key, 60, nx=True)  # the minute may just have ended
                await pipe.execute()


def client_address(request: Request[Any, Any, State]) -> str:
    """Returns the browser's address, as the proxy in front of the service reports it.

    Without the proxy's report, one client that fails to log in would lock out everybody. The header is trusted only
    from a private address: a caller with a public address can write anything into it.
    """
    peer = request.client.host if request.client else ""
    forwarded = request.headers.getall("x-forwarded-for", [])
    try:
        behind_proxy = bool(forwarded) and ipaddress.ip_address(peer).is_private
    except ValueError:
        behind_proxy = bool(forwarded)  # a Unix socket
    return forwarded[-1].rpartition(",")[2].strip() if behind_proxy else peer
