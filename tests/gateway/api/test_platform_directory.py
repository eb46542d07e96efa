"""Operators list all accounts, apps and failed deploys over HTTP."""

import secrets

import pytest

from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_account_is_found_and_shown(gw: Gateway, backend: FakeAppBackend) -> None:
    word = secrets.token_hex(6)
    made = (await gw.platform("POST", "accounts", {"name": f"Café {word}", "plan": "maker"})).json()
    gw.confidential.add(made["apiKey"])
    body = {"account": made["id"], "auth": {"kind": "jwks", "url": backend.jwks_url}}
    assert (await gw.platform("PUT", f"apps/shop-{word}", body)).is_success
    (row,) = (page := (await gw.platform("GET", f"accounts?search=CAFÉ%20{word}")).json())["accounts"]
    assert (row["id"], row["name"], row["plan"], row["apps"]) == (made["id"], f"Café {word}", "maker", 1)
    assert (row["settled"], row["reserved"], row["cap"]) == (0, 0, 2_000_000_000)
    assert page["next"] is None

    details = (await gw.platform("GET", f"accounts/{made['id']}")).json()
    assert {name: details[name] for name in row} == row
    assert [app["name"] for app in details["appList"]] == [f"shop-{word}"]
    assert [(key["name"], "key" in key) for key in details["keys"]] == [("first", False)]
    assert (details["deploysToday"], details["deploysPerDay"]) == (0, 200)
    assert details["members"] == []
    assert (await gw.platform("DELETE", f"accounts/{made['id']}")).json() == {
        "deletesAt": (await gw.platform("GET", f"accounts/{made['id']}")).json()["deletesAt"]
    }
    assert made["apiKey"] not in str(details)
    refused(await gw.platform("GET", "accounts/acc_nobody"), 404, "NOT_FOUND")
    # Apps are found by their account, too.
    for search in (f"shop-{word}", made["id"]):
        (shop,) = (await gw.platform("GET", f"apps?search={search}")).json()["apps"]
        assert (shop["name"], shop["account"], shop["status"]) == (f"shop-{word}", made["id"], "never-live")
        assert shop["accountName"] == f"Café {word}"
    assert (await gw.platform("GET", "apps?health=unhealthy")).json() == {"apps": [], "next": None}
    wrong = ("sort=name", "plan=gold", "suspended=perhaps", "limit=101", f"search={'x' * 201}")
    others = ("apps?limit=0", "apps?health=healthy", "deploys/failed?limit=x")
    for query in (*(f"accounts?{each}" for each in wrong), *others):
        refused(await gw.platform("GET", query), 400, "REQUEST_MALFORMED")


async def test_failed_deploys_are_listed(hosted: App) -> None:
    gw = hosted.gateway
    record = {"account": hosted.account.id, "repository": {"url": "https://git.example.com/a"}}
    await gw.platform("PUT", f"apps/{hosted.name}", record)
    deploy = (await gw.platform("POST", f"apps/{hosted.name}/deploys", {"kind": "live"})).json()["deployId"]
    before = (await gw.platform("GET", "deploys/failed")).json()
    assert deploy not in [row["id"] for row in before]
    await gw.platform("POST", f"deploys/{deploy}/phases", {"phase": "build", "ok": False, "reason": "exit status 1"})
    (failed,) = [row for row in (await gw.platform("GET", "deploys/failed")).json() if row not in before]
    assert (failed["id"], failed["account"], failed["error"]) == (deploy, hosted.account.id, "build: exit status 1")
