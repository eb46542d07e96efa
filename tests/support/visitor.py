"""A browser without a page, with an address and a cookie jar of its own."""

import secrets
from typing import Any

import httpx

from gateway.accounts.sessions import ACCOUNT, OPERATOR
from tests.support.gateway_process import OPERATOR as OPERATOR_TOKEN
from tests.support.gateway_process import Gateway


class Visitor:
    def __init__(self, gw: Gateway) -> None:
        self.gw = gw
        self.headers = {"Origin": gw.address, "X-Forwarded-For": f"198.51.100.7, {secrets.token_hex(8)}"}
        self.http = httpx.AsyncClient(base_url=gw.address, trust_env=False, timeout=30)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Sends a request. An empty header is left out."""
        kept = {name: value for name, value in {**self.headers, **headers}.items() if value}
        return await self.http.request(method, path, json=body, headers=kept)

    async def log_in(self, key: str, **headers: str) -> httpx.Response:
        """Opens an account holder's session."""
        return self._hide(await self.call("POST", "/dashboard/session", {"apiKey": key}, **headers))

    async def log_in_as_operator(self, token: str = OPERATOR_TOKEN, **headers: str) -> httpx.Response:
        return self._hide(await self.call("POST", "/ops/session", {"token": token}, **headers))

    def _hide(self, response: httpx.Response) -> httpx.Response:
        self.gw.confidential |= {response.cookies[name] for name in (ACCOUNT, OPERATOR) if name in response.cookies}
        return response

    @property
    def token(self) -> str:
        return self.http.cookies[ACCOUNT]
