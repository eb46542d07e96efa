"""An account renames itself."""

import pytest

from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_account_renames_itself(gw: Gateway) -> None:
    account, other = await gw.account(), await gw.account()
    before = (await account.get("/account")).json()
    answer = await account.call("PATCH", "/account", {"name": " Ünïcode  &\n<b>"})
    assert answer.status_code == 200
    assert answer.json() == before | {"name": "Ünïcode & <b>"}
    assert (await account.get("/account")).json()["name"] == "Ünïcode & <b>"
    found = await gw.platform("GET", f"accounts/{account.id}")
    assert found.json()["name"] == "Ünïcode & <b>"
    assert (await other.get("/account")).json()["name"] != "Ünïcode & <b>"
    before = (await account.get("/account")).json()
    names = ({"name": name} for name in (" \n", "a\0", "x" * 201, None))
    for body in ({}, *names, {"name": "x", "plan": "max"}, []):
        for method, path in (("PATCH", "/account"), ("POST", "/register")):
            refused(await account.call(method, path, body), 400, "REQUEST_MALFORMED")
    assert (await account.get("/account")).json() == before
