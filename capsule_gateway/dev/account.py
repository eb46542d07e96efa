"""Registers the demo account and its app as an operator would."""

from typing import Any

import httpx
import msgspec

from capsule_gateway.dev.children import StartFailed
from capsule_gateway.dev.identity import OWNER
from capsule_gateway.dev.key_file import Keys
from capsule_gateway.dev.layout import Layout
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store

# A manifest without [auth] leaves the address of the keys at its default, which development serves at another port.
DEFAULT_AUTH = {"kind": "jwks", "url": "/.well-known/jwks.json"}


class DemoApp(msgspec.Struct):
    id: str
    account: str
    auth: dict[str, Any]


async def register_demo(layout: Layout, keys: Keys) -> DemoApp:
    """Registers the account and the app, and keeps the account's API key in `keys`. Raises StartFailed."""
    async with httpx.AsyncClient(base_url=layout.local, trust_env=False, timeout=10) as http:
        try:
            account_id = await _register_account(http, keys)
            await _put_owner(layout, account_id)
            return await _register_app(http, layout, keys, account_id)
        except (httpx.HTTPError, BackboneUnavailable) as error:
            raise StartFailed(f"The app {layout.app} could not be registered: {error}") from None


async def _register_account(http: httpx.AsyncClient, keys: Keys) -> str:
    """Returns the account's id. Registers a new account if the saved key is unknown."""
    answer = await http.get("/account", headers=bearer(keys.api_key or "none"))
    if answer.status_code == 401:
        body = {"name": "Demo", "plan": "maker"}
        answer = await http.post("/platform/accounts", json=body, headers=bearer(keys.operator_token))
        keys.api_key = answer.raise_for_status().json()["apiKey"]
    return str(answer.raise_for_status().json()["id"])


async def _put_owner(layout: Layout, account_id: str) -> None:
    """Makes the demo's person an owner, in Redis. Over HTTP, they would have to accept an invitation first."""
    store = Store(layout.redis)
    try:
        await Registry(store, Vault("")).members.put(account_id, OWNER, "owner")
    finally:
        await store.close()


async def _register_app(http: httpx.AsyncClient, layout: Layout, keys: Keys, account_id: str) -> DemoApp:
    """Creates the app if it is missing. The manifest of the developer's own app determines its users."""
    path, operator = f"/platform/apps/{layout.app}", bearer(keys.operator_token)
    answer = await http.get(path, headers=operator)
    if answer.status_code == 404:
        auth = {"kind": "secret", "secret": keys.auth_secret}  # until the demo's manifest names its own keys
        answer = await http.put(path, json={"account": account_id, "auth": auth}, headers=operator)
    app = msgspec.json.decode(answer.raise_for_status().content, type=DemoApp)
    if app.account != account_id:
        remedy = "Choose another name in capsule.toml." if layout.own_app else f"Delete {layout.folder} to start over."
        raise StartFailed(f"Another account has an app called {layout.app}. {remedy}")
    if layout.own_app:
        body = {"auth": layout.own_app.auth or DEFAULT_AUTH}
        (await http.patch(f"/account/apps/{layout.app}", json=body, headers=bearer(keys.api_key))).raise_for_status()
    return app


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
