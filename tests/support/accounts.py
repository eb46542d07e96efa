"""Accounts and apps at a running gateway, with their requests and their spend."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import httpx_sse

from tests.fakes import FakeAppBackend
from tests.support.polling import wait_until

if TYPE_CHECKING:
    from tests.support.gateway_process import Gateway

DOMAIN = "apps.localhost"


class Account:
    def __init__(self, gateway: Gateway, account_id: str, key: str, key_id: str = "") -> None:
        self.gateway, self.id, self.key, self.key_id = gateway, account_id, key, key_id

    async def call(
        self, method: str, path: str, body: Any = None, *, at: Gateway | None = None, **options: Any
    ) -> httpx.Response:
        """Sends a request with the account's key. `body` is sent as JSON, and `at` is another gateway process."""
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        return await (at or self.gateway).http.request(method, path, json=body, headers=headers, **options)

    async def get(self, path: str = "/account") -> httpx.Response:
        return await self.call("GET", path)

    async def add_key(self, name: str = "other", **fields: Any) -> Account:
        """Returns the account with a new key."""
        response = await self.call("POST", "/account/keys", {"name": name, **fields})
        assert response.status_code == 201, response.text
        self.gateway.confidential.add(response.json()["key"])
        return Account(self.gateway, self.id, response.json()["key"], response.json()["id"])

    async def set_webhook(self, url: str) -> str:
        """Returns the signing secret of a new receiver."""
        secret: str = (await self.call("PUT", "/account/webhook", {"url": url})).json()["secret"]
        self.gateway.confidential.add(secret)
        return secret

    async def spend(self) -> dict[str, Any]:
        response = await self.get()
        assert response.status_code == 200, response.text
        return response.json()["spend"]

    async def settled(self) -> int:
        """Waits until nothing is reserved. Returns the settled nano-euro."""
        spend = await wait_until(self._at_rest)
        return spend["settled"]

    async def _at_rest(self) -> dict[str, Any] | None:
        spend = await self.spend()
        return None if spend["reserved"] else spend

    async def app(self, backend: FakeAppBackend, **fields: Any) -> App:
        name = f"app-{secrets.token_hex(4)}"
        body = {"account": self.id, "auth": {"kind": "jwks", "url": backend.jwks_url}, **fields}
        response = await self.gateway.platform("PUT", f"apps/{name}", body)
        assert response.status_code in (200, 201), response.text
        return App(self, name, backend)


class App:
    def __init__(self, account: Account, name: str, backend: FakeAppBackend) -> None:
        self.account, self.name, self.backend = account, name, backend
        self.gateway = account.gateway
        self.path = f"/capsule/{name}/ai"
        self.origin = f"https://{name}.{DOMAIN}"

    def at(self, gateway: Gateway) -> App:
        """Returns the same app at another gateway process."""
        twin = App(self.account, self.name, self.backend)
        twin.gateway = gateway
        return twin

    def token(self, sub: str | None = "ana", alg: str = "ES256", **options: Any) -> str:
        token = self.backend.token(sub, alg, **options)
        # Only the signature is secret: many tokens share their header and payload.
        self.gateway.confidential.add(token.rpartition(".")[2])
        return token

    def headers(self, token: str | None = None, **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token or self.token()}", **more}

    async def post(self, body: Any = None, *, path: str = "", **options: Any) -> httpx.Response:
        """Sends any request: `content` is for raw bytes, and `headers` replace the usual ones."""
        headers = options.pop("headers", None)
        headers = self.headers() if headers is None else headers
        if body is not None:
            options["content"] = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **headers}
        return await self.gateway.http.post(self.path + path, headers=headers, **options)

    async def ask(self, prompt: str, *, token: str | None = None, **fields: Any) -> httpx.Response:
        return await self.post({"prompt": prompt, **fields}, headers=self.headers(token))

    async def logged(self, request_id: str) -> dict[str, Any]:
        """Waits for the request in the account's log, and returns its details."""

        async def read() -> Any:
            response = await self.account.get(f"/account/requests/{request_id}")
            return response.json() if response.status_code == 200 else None

        return await wait_until(read)

    @contextlib.asynccontextmanager
    async def stream(
        self, prompt: str, *, token: str | None = None, **fields: Any
    ) -> AsyncIterator[httpx_sse.EventSource]:
        body = {"prompt": prompt, "stream": True, **fields}
        async with httpx_sse.aconnect_sse(
            self.gateway.http, "POST", self.path, json=body, headers=self.headers(token)
        ) as source:
            yield source

    async def events(self, prompt: str, **options: Any) -> list[httpx_sse.ServerSentEvent]:
        async with self.stream(prompt, **options) as source:
            return [event async for event in source.aiter_sse()]
