"""Registers the demo account and its apps as an operator would, and deploys them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import httpx

from gateway.dev.children import StartFailed
from gateway.dev.demo import template_files
from gateway.dev.keys import Keys

HELLO = Path(__file__).parent / "hello"


async def register_demo(gateway: str, keys: Keys, jwks_url: str, ai_url: str) -> str:
    """Returns the account's API key: the saved one, unless the database does not know it."""
    async with httpx.AsyncClient(base_url=gateway, trust_env=False, timeout=10) as http:
        try:
            account_id, api_key = await _register_account(http, keys)
            await _put_apps(http, keys.operator_token, account_id, jwks_url)
            hello = {path.name: path.read_bytes() for path in HELLO.iterdir()}
            for app, files in (("demo", template_files(ai_url)), ("hello", hello)):
                await _deploy(http, api_key, app, files)
        except httpx.HTTPError as error:
            raise StartFailed(f"The demo app could not be registered: {error}") from None
        return api_key


async def _register_account(http: httpx.AsyncClient, keys: Keys) -> tuple[str, str]:
    """Returns the account's id and API key."""
    api_key = keys.api_key
    answer = await http.get("/account", headers=_bearer(api_key or "none"))
    if answer.status_code == 401:
        body = {"name": "Demo", "plan": "maker"}
        answer = await http.post("/platform/accounts", json=body, headers=_bearer(keys.operator_token))
        api_key = answer.raise_for_status().json()["apiKey"]
    return answer.raise_for_status().json()["id"], api_key


async def _put_apps(http: httpx.AsyncClient, operator_token: str, account_id: str, jwks_url: str) -> None:
    apps = {
        "demo": {"account": account_id, "auth": {"kind": "jwks", "url": jwks_url}},
        "hello": {"account": account_id, "build": {"command": "sh build.sh", "output": "dist"}},
    }
    for name, app in apps.items():
        answer = await http.put(f"/platform/apps/{name}", json=app, headers=_bearer(operator_token))
        answer.raise_for_status()


async def _deploy(http: httpx.AsyncClient, api_key: str, app: str, files: Mapping[str, bytes]) -> None:
    """Unless it was deployed before."""
    headers = _bearer(api_key)
    deploys = await http.get("/account/deploys", params={"app": app}, headers=headers)
    if not deploys.raise_for_status().json():
        answer = await http.put(f"/account/apps/{app}/source", content=_pack(files), headers=headers)
        answer.raise_for_status()


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _pack(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()
