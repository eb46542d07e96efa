"""Verifies tokens in this process as a gateway does. The app's backend answers over HTTP."""

import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
import pytest_asyncio

from gateway.accounts.records import Auth, BackendAuth, JwksAuth, SecretAuth
from gateway.accounts.vault import Vault
from gateway.errors import AppBackendUnreachable, TokenFault, TokenInvalid
from gateway.inference.auth import backend as backend_module
from gateway.inference.auth import key_sets
from gateway.inference.auth.users import Users
from gateway.outbound.client import Client
from gateway.settings import Settings
from tests.fakes import FakeAppBackend
from tests.gateway.inference.key_hosts import an_app

SECRET = "a shared secret of at least thirty-two bytes, cormorant"


class Verifier:
    def __init__(self, http: Client, backend: FakeAppBackend) -> None:
        self.http, self.backend, self.vault = http, backend, Vault("a key")
        self.users = Users(Settings(), self.vault, http)

    def key_set(self, **fields: Any) -> JwksAuth:
        return JwksAuth(url=self.backend.jwks_url, **fields)

    def secret(self) -> SecretAuth:
        return SecretAuth(secret=self.vault.seal(SECRET))

    def pocketbase(self) -> BackendAuth:
        return BackendAuth(url=self.backend.refresh_url, method="POST", userField="record.id")

    async def verdict(self, token: str, auth: Auth | None = None) -> str:
        """Returns the user, or the status and the reason of the refusal. A check by the app's owner must agree.

        Without `auth`, the keys are the backend's.
        """
        app, given = an_app(auth=auth or self.key_set()), token.encode()
        reason: TokenFault | None = None
        try:
            verdict = await self.users.verify(app, given)
        except (TokenInvalid, AppBackendUnreachable) as error:
            reason = error.reason
            verdict = f"{error.status} {reason}"
        check = await self.users.check(app, given)
        assert (check.valid, check.reason, check.user) == (reason is None, reason, None if reason else verdict)
        return verdict


def b64(data: bytes | dict[str, Any]) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def claims(**changes: Any) -> dict[str, Any]:
    """Returns the claims of a valid token with changes; `...` leaves one out."""
    made = {"sub": "ana", "exp": int(time.time()) + 3600, **changes}
    return {name: value for name, value in made.items() if value is not ...}


def sign(backend: FakeAppBackend, payload: bytes | dict[str, Any], **header: Any) -> str:
    """Signs what PyJWT refuses to encode: claims and members of the header of any type, or no JSON."""
    kid, key = backend.keys["ES256"]
    text = f"{b64({'alg': 'ES256', 'typ': 'JWT', 'kid': kid, **header})}.{b64(payload)}"
    return f"{text}.{b64(jwt.get_algorithm_by_name('ES256').sign(text.encode(), key))}"


@pytest_asyncio.fixture(loop_scope="session")
async def verifier(backend: FakeAppBackend) -> AsyncIterator[Verifier]:
    """Verifies tokens of an app with the folder's backend."""
    async with Client(allow_private=True) as http:
        yield Verifier(http, backend)


@pytest_asyncio.fixture(loop_scope="session")
async def alone(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Verifier]:
    """Verifies tokens of an app with its own backend, which the test may break, and waits half a second for it."""
    monkeypatch.setattr(key_sets, "FETCH_SECONDS", 0.5)
    monkeypatch.setattr(backend_module, "CALL_SECONDS", 0.5)
    async with FakeAppBackend() as backend, Client(allow_private=True) as http:
        yield Verifier(http, backend)
