"""The demo account and its apps, registered as an operator would, and the first deploy of one."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import httpx

from gateway.dev.children import Refusal
from gateway.dev.kept import Kept

HELLO = Path(__file__).parent / "hello"


def packed(folder: Path) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(folder, ".")
    return archive.getvalue()


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
            hello = {"account": app["account"], "build": {"command": "sh build.sh", "output": "dist"}}
            (await http.put("/platform/apps/hello", json=hello, headers=operator)).raise_for_status()
            holder = {"Authorization": f"Bearer {api_key}"}
            deploys = await http.get("/account/deploys", params={"app": "hello"}, headers=holder)
            if not deploys.raise_for_status().json():
                url = "/account/apps/hello/source"
                (await http.put(url, content=packed(HELLO), headers=holder)).raise_for_status()
        except httpx.HTTPError as error:
            raise Refusal(f"The demo app could not be registered: {error}") from None
        return api_key
