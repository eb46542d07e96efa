"""The account API of deploys, and the reports of an external engine, as tests call them."""

import secrets
from typing import Any

import httpx

from gateway.keys import bodies_key
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway

TARBALL = b"\x1f\x8b" + secrets.token_bytes(200)


async def an_app(account: Account, **fields: Any) -> str:
    name = f"app-{secrets.token_hex(4)}"
    assert (await account.gateway.platform("PUT", f"apps/{name}", {"account": account.id, **fields})).is_success
    return name


async def a_hook(account: Account, app: str) -> dict[str, str]:
    created = await account.call("POST", f"/account/apps/{app}/hooks", {"name": "ci"})
    assert created.status_code == 201
    hook: dict[str, str] = created.json()
    account.gateway.confidential.add(hook["url"].rpartition("/")[2])
    return hook


async def trigger(gw: Gateway, hook: dict[str, str]) -> httpx.Response:
    return await gw.http.post(httpx.URL(hook["url"]).path, content=b"ignored")


async def publish(account: Account, app: str, body: bytes = TARBALL) -> httpx.Response:
    return await account.call("PUT", f"/account/apps/{app}/source", content=body)


async def report_phase(
    gw: Gateway, deploy: str, name: str, ok: bool = True, reason: str | None = None
) -> httpx.Response:
    return await gw.platform("POST", f"deploys/{deploy}/phases", {"phase": name, "ok": ok, "reason": reason})


async def report_phases(gw: Gateway, deploy: str, *names: str, ok: bool = True, reason: str | None = None) -> None:
    """Reports the end of each phase, and requires that the gateway accepts it."""
    for name in names:
        response = await report_phase(gw, deploy, name, ok, reason)
        assert response.status_code == 200, response.text


def queued_events(gw: Gateway) -> list[tuple[str, str]]:
    """Returns type and data of the events that wait."""
    with gw.redis.client() as client:
        streams = [client.xrange(key) for key in client.scan_iter("*:events")]
        found = [fields for stream in streams for _, fields in stream]
        bodies = [client.hget(bodies_key(each[b"account"].decode()), each[b"id"]) for each in found]
    return [(each[b"type"].decode(), body.decode()) for each, body in zip(found, bodies, strict=True)]
