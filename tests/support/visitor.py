"""A browser without a page, with an address and a cookie jar of its own."""

import secrets
from typing import Any

import httpx

from gateway.accounts.api_keys import digest
from gateway.accounts.session_store import SESSION_SECONDS, Person
from gateway.accounts.sessions import ACCOUNT, OPERATOR
from gateway.keys import session_key, sessions_key
from tests.support.accounts import Account
from tests.support.gateway_process import OPERATOR as OPERATOR_TOKEN
from tests.support.gateway_process import Gateway


def new_address(name: str = "") -> str:
    """Returns an address in a network of its own, for which failed log-ins are counted alone, and registrations not."""
    digits = name or secrets.token_hex(8)
    return f"fd00:{digits[:4]}:{digits[4:8]}:{digits[8:12]}::1"


class Visitor:
    def __init__(self, gw: Gateway) -> None:
        self.gw = gw
        self.name = secrets.token_hex(8)
        self.headers = {"Origin": gw.address, "X-Forwarded-For": f"198.51.100.7, {new_address(self.name)}"}
        # Over plain HTTP: without `verify`, it need not read the authorities, which takes longer than most tests.
        self.http = httpx.AsyncClient(base_url=gw.address, trust_env=False, timeout=30, verify=False)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Sends a request. An empty header is left out."""
        kept = {name: value for name, value in {**self.headers, **headers}.items() if value}
        return await self.http.request(method, path, json=body, headers=kept)

    async def log_in(self, key: str, **headers: str) -> httpx.Response:
        """Opens an account holder's session."""
        return self._hide(await self.call("POST", "/dashboard/session", {"apiKey": key}, **headers))

    async def log_in_as_operator(self, token: str = OPERATOR_TOKEN, **headers: str) -> httpx.Response:
        return self._hide(await self.call("POST", "/ops/session", {"token": token}, **headers))

    def become(self, email: str, account_id: str = "", issuer: str | None = None) -> None:
        """Opens the session of somebody who has signed in, without a provider."""
        token = secrets.token_urlsafe(32)
        self.gw.confidential.add(token)
        if issuer is None:
            issuer = self.gw.environment.get("GATEWAY_OIDC_ISSUER", "")
        person = Person(email, account_id, issuer=issuer)
        with self.gw.redis.client() as client:
            client.set(session_key(digest(token)), str(person), ex=SESSION_SECONDS)
            client.lpush(sessions_key(digest(person.holder)), digest(token))
            client.expire(sessions_key(digest(person.holder)), SESSION_SECONDS)
        self.http.cookies.set(ACCOUNT, token, domain="127.0.0.1", path="/")

    async def join(self, account: Account, email: str, role: str = "owner") -> None:
        """Makes the address a member, as people do: the account invites it, and whoever signs in with it accepts.

        The account is then chosen in this browser's session.
        """
        invited = await account.call("PUT", f"/account/members/{email}", {"role": role})
        assert invited.status_code == 200, invited.text
        self.become(email.lower())
        accepted = await self.call("PUT", f"/dashboard/session/invitations/{account.id}")
        assert accepted.status_code == 200, accepted.text

    def _hide(self, response: httpx.Response) -> httpx.Response:
        self.gw.confidential |= {response.cookies[name] for name in (ACCOUNT, OPERATOR) if name in response.cookies}
        return response

    @property
    def token(self) -> str:
        return self.http.cookies[ACCOUNT]
