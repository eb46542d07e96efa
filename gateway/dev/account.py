"""The demo account and its app, registered as an operator would."""

from __future__ import annotations

import httpx

from .children import Refusal
from .kept import Kept


async def registered(gateway: str, kept: Kept, jwks_url: str) -> str:
    """The account's API key: the one it had before, as long as the database knows it."""
    async with httpx.AsyncClient(base_url=gateway, trust_env=False, timeout=10) as http:
        operator = {"Authorization": f"Bearer {kept.operator_token}"}
        api_key = kept.api_key
        try:
            found = await http.get("/account", headers={"Authorization": f"Bearer {api_key or 'none'}"})
            if found.status_code == 401:
                found = await http.post("/platform/accounts", json={"name": "Demo", "plan": "maker"}, headers=operator)
                api_key = found.raise_for_status().json()["apiKey"]
            app = {"account": found.raise_for_status().json()["id"], "auth": {"kind": "jwks", "url": jwks_url}}
            (await http.put("/platform/apps/demo", json=app, headers=operator)).raise_for_status()
        except httpx.HTTPError as error:
            raise Refusal(f"The demo app could not be registered: {error}") from None
        return api_key
