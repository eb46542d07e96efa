"""Every change of an account is in its trail, with who made it, and without values."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.accounts import trail
from gateway.accounts.access import Access
from gateway.accounts.records import Account as AccountRecord
from gateway.accounts.sessions import ACCOUNT
from gateway.accounts.trail import AccountTrail, hide_secret
from gateway.keys import account_audit_key
from gateway.redis.client import Store
from tests.support.accounts import Account, App
from tests.support.agents import call, over_http
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.stores import opened

session = pytest.mark.asyncio(loop_scope="session")


async def entries(account: Account, query: str = "") -> list[dict[str, Any]]:
    response = await account.call("GET", f"/account/audit{query}")
    assert response.status_code == 200, response.text
    return response.json()


async def changes(account: Account) -> list[tuple[str, str, str]]:
    return [(entry["by"], entry["action"], entry["target"]) for entry in await entries(account)]


@session
async def test_changes_by_a_key(app: App) -> None:
    account = app.account
    made = (await account.call("POST", "/account/keys", {"name": "ci"})).json()
    account.gateway.confidential.add(made["key"])
    await account.call("PUT", f"/account/apps/{app.name}/env", {"SECRET": "a secret value"})
    await account.call("PATCH", "/account", {"name": "A new name"})
    await account.call("DELETE", f"/account/keys/{made['id']}")
    found = await entries(account)
    assert found[0].keys() == {"id", "at", "who", "by", "action", "target"}
    assert found[0]["who"].startswith("first (key_")
    assert [(each["action"], each["target"]) for each in found][:4] == [
        ("revoke_key", made["id"]),
        ("rename_account", ""),
        ("change_variables", app.name),
        ("create_key", made["id"]),
    ]
    assert {each["by"] for each in found[:4]} == {"key"}
    text = json.dumps(found)
    for value in ("a secret value", "SECRET", "A new name", made["key"]):
        assert value not in text


@session
async def test_what_is_refused_or_changes_nothing_leaves_no_entry(app: App) -> None:
    account = app.account
    before = await entries(account)
    for method, path, body in (
        ("POST", "/account/keys", {"name": ""}),
        ("DELETE", "/account/keys/key_none", None),
        ("PUT", "/account/apps/nothing/env", {"A": "b"}),
        ("PUT", "/account/webhook", {"url": "ftp://x"}),
    ):
        assert (await account.call(method, path, body)).status_code in (400, 404)
    await account.call("POST", f"/account/apps/{app.name}/token-check", {"token": "x"})
    for path in ("/account", "/account/apps", "/account/audit"):
        await account.call("GET", path)
    assert await entries(account) == before


@session
async def test_changes_by_a_session_an_agent_and_operators(gw: Gateway, app: App) -> None:
    account = app.account
    own = {"Origin": gw.address}
    async with httpx.AsyncClient(base_url=gw.address, trust_env=False) as browser:
        await browser.post("/dashboard/session", json={"apiKey": account.key}, headers=own)
        gw.confidential.add(browser.cookies[ACCOUNT])
        await browser.put(f"/account/apps/{app.name}/limits", json={"requestsPerMinute": 5}, headers=own)
    async with over_http()(gw.address, account.key) as client:
        await call(client, "service_env", action="set", app=app.name, variables={"NAME": "value"})
        await call(client, "service_env", action="list", app=app.name)
        await client.call_tool("service_env", {"action": "set", "app": "nothing", "variables": {"A": "b"}})
    await gw.platform("PUT", f"accounts/{account.id}/suspension", {"reason": "Too loud"})
    await gw.platform("DELETE", f"accounts/{account.id}/suspension")
    key = (await gw.platform("POST", f"accounts/{account.id}/keys", {"name": "spare"})).json()
    gw.confidential.add(key["key"])
    await gw.platform("DELETE", f"apps/{app.name}")
    refused(await gw.platform("PATCH", f"accounts/{account.id}", {"plan": "none"}), 400, "REQUEST_MALFORMED")
    assert await changes(account) == [
        ("operator", "delete_app", app.name),
        ("operator", "create_key_for", key["id"]),
        ("operator", "resume_account", ""),
        ("operator", "suspend_account", ""),
        ("key", "change_variables", app.name),
        ("session", "change_limits", app.name),
        ("operator", "put_app", app.name),
        ("operator", "create_account", ""),
    ]
    assert "Too loud" not in json.dumps(await entries(account))
    assert (await entries(account))[0]["who"] == "operator"


@session
async def test_an_app_that_moves_is_in_both_trails(gw: Gateway, app: App) -> None:
    other = await gw.account()
    await gw.platform("PUT", f"apps/{app.name}", {"account": other.id})
    for account in (app.account, other):
        assert (await changes(account))[0] == ("operator", "put_app", app.name)


@session
async def test_pages_of_the_trail(app: App) -> None:
    account = app.account
    for n in range(5):
        await account.call("PATCH", "/account", {"name": f"Name {n}"})
    everything = await entries(account)
    page = await entries(account, "?limit=2")
    assert page == everything[:2]
    assert await entries(account, f"?limit=3&before={page[-1]['id']}") == everything[2:5]
    for query in ("limit=0", "limit=201", "before=x", "before=0-0"):
        refused(await account.call("GET", f"/account/audit?{query}"), 400, "REQUEST_MALFORMED")


@session
async def test_another_account_s_changes_are_not_listed(gw: Gateway, app: App) -> None:
    await app.account.call("PATCH", "/account", {"name": "Changed"})
    stranger = await gw.account()
    assert await changes(stranger) == [("operator", "create_account", "")]


@session
async def test_secrets_in_paths_are_hidden(app: App) -> None:
    account = app.account
    made = (await account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "hook"})).json()
    account.gateway.confidential.add(token := made["url"].rpartition("/")[2])
    for path in (f"/account/keys/{account.key}", f"/account/hooks/{token}"):
        assert (await account.call("DELETE", path)).status_code == 404
    for secret in (account.key, token, "whsec_abc", f"https://x/hooks/deploy/{token}"):
        assert hide_secret(secret) == "(not recorded)"
    for name in (app.name, made["id"], "a" * 43, "a-name-of-an-app-that-has-forty-three-letters"):
        assert hide_secret(name) == name


# -- bounds and faults ---------------------------------------------------------------------------------------


ACCESS = Access(AccountRecord(id="acc_1", name="One", plan="free", createdAt=""), "laptop (key_1)")


async def test_the_trail_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "MAX_ENTRIES", 100)
    kept = AccountTrail(store)
    for n in range(500):
        await kept.begin(ACCESS, "publish", f"app-{n}")
    key = account_audit_key("acc_1")
    assert await store.client.xlen(key) <= 200  # Redis removes whole nodes
    assert 0 < await store.client.ttl(key) <= trail.KEPT_SECONDS
    await asyncio.sleep(0.01)
    monkeypatch.setattr(trail, "KEPT_SECONDS", 0)
    assert await kept.list("acc_1", 200) == []


async def test_a_fault_of_redis_stops_no_change(proxy: Any) -> None:
    async with opened(proxy.url) as store:
        kept = AccountTrail(store)
        proxy.go_down()
        entry = await kept.begin(ACCESS, "publish", "notes")
        assert entry == ""
        await kept.forget(ACCESS, entry)
        await kept.forget(ACCESS, "1-1")
        await kept.add_operators_change("acc_1", "ana", "change_account", "")
