"""An account renames itself."""

from typing import Any

import pytest

from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def rename(gw: Gateway, body: Any, **headers: str) -> Any:
    return await gw.http.patch("/account", json=body, headers=headers)


async def test_an_account_renames_itself(gw: Gateway, twin: Gateway) -> None:
    account, other = await gw.account(), await gw.account()
    before = (await account.get("/account")).json()
    bearer = {"Authorization": f"Bearer {account.key}"}
    answer = await rename(gw, {"name": "Ünïcode & <b>"}, **bearer)
    assert answer.status_code == 200
    assert answer.json() == before | {"name": "Ünïcode & <b>"}
    assert (await account.get("/account")).json()["name"] == "Ünïcode & <b>"
    found = await gw.platform("GET", f"accounts/{account.id}")
    assert found.json()["name"] == "Ünïcode & <b>"
    assert (await other.get("/account")).json()["name"] != "Ünïcode & <b>"


@pytest.mark.parametrize(
    "body",
    [{}, {"name": ""}, {"name": "x" * 201}, {"name": None}, {"name": 1}, {"name": "x", "plan": "max"}, [], "x"],
    ids=["nothing", "empty", "long", "null", "number", "plan", "list", "text"],
)
async def test_nothing_else_can_be_changed(gw: Gateway, body: Any) -> None:
    account = await gw.account()
    before = (await account.get("/account")).json()
    refused(await rename(gw, body, Authorization=f"Bearer {account.key}"), 400, "REQUEST_MALFORMED")
    assert (await account.get("/account")).json() == before


async def test_only_the_account_itself(gw: Gateway) -> None:
    for headers in ({}, {"Authorization": "Bearer csk_nobody"}):
        refused(await rename(gw, {"name": "x"}, **headers), 401, "UNAUTHORIZED")


async def test_another_sites_page_cannot_rename(gw: Gateway) -> None:
    account = await gw.account()
    login = await gw.http.post("/dashboard/session", json={"apiKey": account.key}, headers={"Origin": gw.address})
    cookie = login.headers["set-cookie"].partition(";")[0]
    gw.confidential.add(cookie.partition("=")[2])
    gw.http.cookies.clear()
    answer = await rename(gw, {"name": "x"}, Cookie=cookie, Origin="https://evil.example")
    refused(answer, 403, "CSRF_REFUSED")
