"""Every change of an account is in its trail, with who made it, and without values."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from gateway.accounts import trail
from gateway.accounts.access import CALLS, Access
from gateway.accounts.records import Account as AccountRecord
from gateway.accounts.trail import AccountTrail, TrailFilter, find_part, hide_secret
from gateway.redis.client import Store
from tests.support.accounts import Account, App
from tests.support.agents import call, over_http
from tests.support.gateway_process import Gateway
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.visitor import Visitor

session = pytest.mark.asyncio(loop_scope="session")


async def entries(account: Account, query: str = "") -> list[dict[str, Any]]:
    response = await account.call("GET", f"/account/audit{query}")
    assert response.status_code == 200, response.text
    return response.json()


async def changes(account: Account) -> list[tuple[str, str, str]]:
    return [(entry["by"], entry["action"], entry["target"]) for entry in await entries(account)]


@session
async def test_changes_by_a_key(app: App) -> None:
    """What is refused or changes nothing leaves no entry."""
    account = app.account
    made = await account.add_key("ci")
    new = (await account.call("POST", "/account/apps", {"name": f"new-{app.name}"})).json()
    await account.call("PUT", f"/account/apps/{app.name}/env", {"SECRET": "a secret value"})
    await account.call("PATCH", "/account", {"name": "A new name"})
    await account.call("DELETE", f"/account/keys/{made.key_id}")
    found = await entries(account)
    assert found[0].keys() == {"id", "at", "who", "by", "action", "target", "count"}
    assert found[0]["who"].startswith("first (key_")
    assert [(each["action"], each["target"]) for each in found][:4] == [
        ("revoke_key", made.key_id),
        ("rename_account", ""),
        ("change_variables", app.name),
        ("create_app", new["name"]),
    ]
    assert new["id"] != new["name"], "the id is nothing that a person has seen"
    assert {each["by"] for each in found[:4]} == {"key"}
    text = json.dumps(found)
    for value in ("a secret value", "SECRET", "A new name", made.key):
        assert value not in text
    for method, path, body in (
        ("POST", "/account/keys", {"name": ""}),
        ("DELETE", "/account/keys/key_none", None),
        ("PUT", "/account/apps/nothing/env", {"A": "b"}),
    ):
        assert (await account.call(method, path, body)).status_code in (400, 404)
    await account.call("POST", f"/account/apps/{app.name}/token-check", {"token": "x"})
    assert await entries(account) == found


@session
async def test_changes_by_a_session_an_agent_and_operators(gw: Gateway, app: App, visitor: Visitor) -> None:
    account = app.account
    await visitor.log_in(account.key)
    await visitor.call("PUT", f"/account/apps/{app.name}/limits", {"requestsPerMinute": 5})
    async with over_http()(gw.address, account.key) as client:
        await call(client, "service_env", action="set", app=app.name, variables={"NAME": "value"})
        await call(client, "service_env", action="list", app=app.name)
        await client.call_tool("service_env", {"action": "set", "app": "nothing", "variables": {"A": "b"}})
    await gw.platform("PUT", f"accounts/{account.id}/suspension", {"reason": "Too loud"})
    await gw.platform("DELETE", f"accounts/{account.id}/suspension")
    key = (await gw.platform("POST", f"accounts/{account.id}/keys", {"name": "spare"})).json()
    gw.confidential.add(key["key"])
    other = await gw.account()
    await gw.platform("PUT", f"apps/{app.name}", {"account": other.id})
    await gw.platform("DELETE", f"apps/{app.name}")
    moved = [("operator", "delete_app", app.name), ("operator", "put_app", app.name)]
    assert (await changes(other))[:2] == moved
    refused(await gw.platform("PATCH", f"accounts/{account.id}", {"plan": "none"}), 400, "REQUEST_MALFORMED")
    assert await changes(account) == [
        ("operator", "create_key_for", key["id"]),
        ("operator", "resume_account", ""),
        ("operator", "suspend_account", ""),
        ("key", "change_variables", app.name),
        ("session", "change_limits", app.name),
        ("operator", "put_app", app.name),
        ("operator", "create_account", ""),
    ]
    found = await entries(account)
    assert "Too loud" not in json.dumps(found)
    assert (found[0]["who"], found[-2]["count"]) == ("operator", 2), "an app that moves is in both trails"


@session
async def test_pages_of_the_trail(app: App) -> None:
    account = app.account
    for n in range(5):
        await account.call("PUT", "/account/webhook", {"url": f"https://{n}.example.com/"})
        await account.gateway.platform("PATCH", f"accounts/{account.id}", {"plan": "max" if n % 2 else "maker"})
    everything = await entries(account)
    assert {each["action"] for each in everything} > {"set_webhook", "change_account"}
    assert [each["at"] for each in everything] == sorted((each["at"] for each in everything), reverse=True)
    for size in (1, 3):
        paged, before = [], ""
        while page := await entries(account, f"?limit={size}{before}"):
            paged += page
            before = f"&before={page[-1]['id']}"
        assert paged == everything
    for query in ("limit=0", "limit=201", "before=x", "before=0-0"):
        refused(await account.call("GET", f"/account/audit?{query}"), 400, "REQUEST_MALFORMED")


@session
async def test_secrets_in_paths_are_hidden(app: App) -> None:
    account = app.account
    made = (await account.call("POST", f"/account/apps/{app.name}/hooks", {"name": "hook"})).json()
    account.gateway.confidential.add(token := made["url"].rpartition("/")[2])
    for path in (f"/account/keys/{account.key}", f"/account/hooks/{token}"):
        assert (await account.call("DELETE", path)).status_code == 404
    written = ("csk_-x", "csk__x", "whsec_abc", "whsec_+x", "whsec_/x", "/hooks/deploy/-x")  # base64 may begin so
    for secret in (account.key, token, f"https://x/hooks/deploy/{token}", *written):
        assert hide_secret(secret) == "(not recorded)"
    for name in (app.name, made["id"], "a" * 43, "a-name-of-an-app-that-has-forty-three-letters"):
        assert hide_secret(name) == name


# -- bounds and faults ---------------------------------------------------------------------------------------


ACCESS = Access(AccountRecord(id="acc_1", name="One", plan="free", createdAt=""), "laptop (key_1)")


CI = msgspec.structs.replace(ACCESS, who="ci (key_2)", scope="deploy")
RIGHTS = {
    *("create_key", "revoke_key", "set_member", "remove_member", "leave", "keep_account"),
    *("set_webhook", "clear_webhook", "rotate_secret", "test_webhook"),
}


@pytest.fixture
async def kept(store: Store) -> AccountTrail:
    """Returns a trail with small limits."""
    return AccountTrail(store, limits=trail.LIMITS._replace(entries=100, share=20), read_entries=7)


async def test_many_actors_push_out_neither_rights_nor_operators(kept: AccountTrail) -> None:
    await kept.add_operators_change("acc_1", "chief", "change_account", "")
    for action in (*RIGHTS, "accept_invitation"):
        await kept.begin(ACCESS, action, "")
    before = await kept.list("acc_1", 200)
    for n in range(150):
        await kept.begin(msgspec.structs.replace(CI, who=f"ci (key_{n})"), "publish", f"app-{n}")
    found = await kept.list("acc_1", 200)
    assert len(found) == 112
    assert [each for each in found if each.action != "publish"] == before
    [oldest] = await kept.list("acc_1", 15, None, TrailFilter("chief"))
    assert oldest.action == "change_account", "a filter reads on until it has enough"


def test_which_changes_are_kept_apart() -> None:
    apart = {call.name for call in CALLS.values() if call.changes and find_part("key", call.name) == "rights"}
    assert apart == RIGHTS


async def test_a_fault_of_redis_stops_no_change(proxy: Any) -> None:
    async with opened(proxy.url) as store:
        kept = AccountTrail(store)
        written = await kept.begin(ACCESS, "publish", "notes")
        await asyncio.sleep(0.01)
        expired = AccountTrail(store, limits=trail.LIMITS._replace(kept=0))
        assert await expired.list("acc_1", 200) == []
        proxy.go_down()
        assert await kept.begin(ACCESS, "publish", "notes") is None
        await kept.forget(ACCESS, None)
        await kept.forget(ACCESS, written)
        await kept.add_operators_change("acc_1", "ana", "change_account", "")


@session
async def test_equal_changes_are_one_entry_with_a_count(app: App) -> None:
    account = app.account
    made = await account.add_key("ci", scope="deploy", app=app.name)
    for _ in range(5):
        assert (await made.call("POST", f"/account/apps/{app.name}/build-cache/clear")).status_code == 204
    newest, *_ = found = await entries(account)
    assert (newest["action"], newest["count"], newest["who"]) == ("clear_build_cache", 5, f"ci ({made.key_id})")
    for query in (f"actor={made.key_id}", "action=clear_build_cache"):
        assert await entries(account, f"?{query}") == found[:1]
    assert await entries(account, f"?actor={made.key_id}&action=publish") == []
