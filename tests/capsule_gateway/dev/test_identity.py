"""The OpenID provider of `capsule dev`, as the gateway's sign-in uses it."""

import secrets
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from capsule_gateway.dev.identity import CLIENT_ID, OWNER, PATH, identity_router
from capsule_gateway.dev.in_process import hold_port, serve_app
from capsule_gateway.dev.model import model_app
from gateway.accounts.openid import OpenId
from gateway.errors import SignInFailed
from gateway.outbound.client import Client
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.redis_servers import free_port


async def test_a_sign_in(store: Store) -> None:
    port, secret = free_port(), secrets.token_hex(16)
    issuer, base = f"http://localhost:{port}{PATH}", "http://localhost:9"
    router = identity_router(issuer, f"{base}/dashboard/callback", secret)
    values: dict[str, Any] = {"oidc_issuer": issuer, "oidc_client_id": CLIENT_ID, "oidc_client_secret": secret}
    settings = Settings(base_url=base, **values)
    async with (
        serve_app(model_app("key", router), hold_port(port, "test")),
        Client(allow_private=True, own=True) as calls,
        httpx.AsyncClient(trust_env=False) as browser,
    ):
        openid = OpenId(settings, store, calls)
        ticket, address = await openid.begin("dashboard")
        page = await browser.get(address)
        assert page.status_code == 200
        assert OWNER in page.text
        # A browser follows the answer of the form to the service, which is at another port.
        assert f"form-action 'self' {base}/dashboard/callback;" in page.headers["content-security-policy"]
        answer = (await browser.get(f"{address}&login={OWNER}")).headers["location"]
        assert answer.startswith(f"{base}/dashboard/callback?")
        parameters = dict(parse_qsl(urlsplit(answer).query))
        assert (await openid.complete(ticket, parameters)).email == OWNER
        # A code works once, and with the verifier of its own sign-in.
        other, address = await openid.begin("dashboard")
        state = dict(parse_qsl(urlsplit(address).query))["state"]
        for code in (parameters["code"], "unknown"):
            with pytest.raises(SignInFailed):
                await openid.complete(other, {**parameters, "state": state, "code": code})
        assert (await browser.get(address, headers={"Host": f"evil.example:{port}"})).status_code == 404
        assert (await browser.get(address.replace("localhost%3A9", "evil.example"))).status_code == 400
        assert (await browser.get(f"http://localhost:{port}/v1/models")).status_code == 401
