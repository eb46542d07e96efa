"""Registers the demo account and its apps as an operator would, and deploys them."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import httpx

from gateway.dev.children import StartFailed
from gateway.dev.demo import template_files
from gateway.dev.keys import Keys

HELLO = Path(__file__).parent / "hello"
IN_PROGRESS = ("queued", "building", "checking", "canary")
DEPLOY_SECONDS = 60.0
POLL_SECONDS = 0.1


async def register_demo(gateway: str, keys: Keys, jwks_url: str) -> str:
    """Returns the account's API key: the saved one, or a new one if the saved one is unknown. Raises StartFailed."""
    async with httpx.AsyncClient(base_url=gateway, trust_env=False, timeout=10) as http:
        try:
            account_id, api_key = await _register_account(http, keys)
            await _put_apps(http, keys.operator_token, account_id, jwks_url)
        except httpx.HTTPError as error:
            raise StartFailed(f"The demo app could not be registered: {error}") from None
        return api_key


async def deploy_demo(gateway: str, api_key: str, hosted: str, ai_url: str) -> str:
    """Deploys the demo's apps unless they are live. Returns why the app `hello` does not answer, or an empty string.

    `hosted` is the address at which the workers serve all apps. Raises StartFailed.
    """
    apps = {"demo": template_files(ai_url), "hello": {path.name: path.read_bytes() for path in HELLO.iterdir()}}
    async with (
        httpx.AsyncClient(base_url=gateway, trust_env=False, timeout=10, headers=_bearer(api_key)) as http,
        httpx.AsyncClient(base_url=hosted, trust_env=False, timeout=10) as pages,
    ):
        try:
            async with asyncio.timeout(DEPLOY_SECONDS):
                while await _fetch_status(pages, "hello") is None:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
                deploys = {app: await _deploy_app(http, pages, app, files) for app, files in apps.items()}
                return await _wait_for_app(http, pages, "hello", deploys["hello"])
        except TimeoutError:
            return f"it does not answer after {DEPLOY_SECONDS:.0f} seconds; the dashboard shows the log of its deploy"
        except httpx.HTTPError as error:
            raise StartFailed(f"The demo app could not be deployed: {error}") from None


async def _register_account(http: httpx.AsyncClient, keys: Keys) -> tuple[str, str]:
    """Returns the account's id and API key, of a new account if the saved key is unknown."""
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


async def _deploy_app(http: httpx.AsyncClient, pages: httpx.AsyncClient, app: str, files: Mapping[str, bytes]) -> str:
    """Returns the id of the app's deploy, or an empty string if the app answers already."""
    if await _fetch_status(pages, app) == 200:
        return ""
    answer = await http.get("/account/deploys", params={"app": app, "limit": 1})
    for deploy in answer.raise_for_status().json():
        if deploy["state"] in IN_PROGRESS:
            return str(deploy["id"])
    answer = await http.put(f"/account/apps/{app}/source", content=_pack_files(files))
    return str(answer.raise_for_status().json()["deployId"])


async def _wait_for_app(http: httpx.AsyncClient, pages: httpx.AsyncClient, app: str, deploy_id: str) -> str:
    """Waits until the app answers or its deploy fails. Returns why it failed, or an empty string."""
    while await _fetch_status(pages, app) != 200:
        await asyncio.sleep(POLL_SECONDS)
        if deploy_id:
            deploy = (await http.get(f"/account/deploys/{deploy_id}")).raise_for_status().json()
            if deploy["state"] not in (*IN_PROGRESS, "live"):
                return str(deploy.get("error") or f"its deploy is {deploy['state']}")
    return ""


async def _fetch_status(pages: httpx.AsyncClient, app: str) -> int | None:
    """Returns the status of the app's first page, or None while nothing serves apps."""
    try:
        return (await pages.get("/", headers={"Host": f"{app}.apps.localhost"})).status_code
    except httpx.TransportError:
        return None


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _pack_files(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()
