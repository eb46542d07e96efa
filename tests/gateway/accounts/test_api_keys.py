"""API keys are created, listed and revoked over HTTP, at two processes, and their uses are written."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
import redis.asyncio

from gateway.accounts.api_keys import MAX_KEYS, MAX_KEYS_BY_OPERATORS, ApiKeys, KeyReference, digest
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import ACCOUNT
from gateway.ids import now_iso
from gateway.keys import api_key_key, api_keys_used_key
from tests.fakes import FakeAppBackend
from tests.support.accounts import Account
from tests.support.background import cancel
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from tests.support.visitor import Visitor

session = pytest.mark.asyncio(loop_scope="session")
KEYS = "/account/keys"


async def list_keys(account: Account) -> list[dict[str, Any]]:
    response = await account.get(KEYS)
    assert response.status_code == 200, response.text
    return response.json()


async def revoke(account: Account, key_id: str) -> httpx.Response:
    return await account.call("DELETE", f"{KEYS}/{key_id}")


# -- over HTTP -----------------------------------------------------------------------------------------------


@session
async def test_a_key_is_shown_once(account: Account) -> None:
    created = (await account.call("POST", KEYS, {"name": "  nightly build  "})).json()
    account.gateway.confidential.add(created["key"])
    assert created.keys() == {"id", "name", "scope", "app", "key", "createdAt", "by"}
    assert created["name"] == "nightly build"
    assert created["key"].startswith("csk_")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", created["createdAt"])
    listed = (await account.get(KEYS)).text
    assert created["id"] in listed
    assert created["key"] not in listed
    assert digest(created["key"]) not in listed
    assert (await Account(account.gateway, account.id, created["key"]).get()).json()["id"] == account.id


@session
async def test_who_made_a_key(account: Account, visitor: Visitor) -> None:
    """A key, a person who signed in, or an operator; nobody is known of the one made with the account."""
    [first] = await list_keys(account)
    assert first.keys() == {"id", "name", "scope", "app", "createdAt", "by", "lastUsedAt"}
    by_key = await account.add_key("by a key")
    email = f"{visitor.name}@example.com"
    await visitor.join(account, email)
    made = [await visitor.call("POST", KEYS, {"name": "by a person"})]
    made.append(await account.gateway.platform("POST", f"accounts/{account.id}/keys", {"name": "by an operator"}))
    account.gateway.confidential |= {each.json()["key"] for each in made}
    assert [each.json()["by"] for each in made] == [email, "operator"]
    expected = ["operator", email, f"first ({first['id']})", None]
    assert [key["by"] for key in await list_keys(account)] == expected
    rows = (await account.gateway.platform("GET", f"accounts/{account.id}/keys")).json()
    assert [key["by"] for key in rows] == expected
    assert [key["name"] for key in await list_keys(by_key)][2:] == ["by a key", "first"], "newest first"


@session
async def test_a_revoked_key_and_its_session_are_refused_at_once_in_every_process(
    account: Account, gw: Gateway, twin: Gateway
) -> None:
    """Otherwise the session of a leaked key would last for up to twelve hours."""
    leaked = await account.add_key("leaked")
    cookies = {}
    for key in (account.key, leaked.key):
        visitor = Visitor(gw)
        async with visitor.http:
            assert (await visitor.log_in(key)).status_code == 204
            cookies[key] = {"Cookie": f"{ACCOUNT}={visitor.token}"}
    for process in (gw, twin):
        assert (await leaked.call("GET", "/account", at=process)).status_code == 200
        assert (await process.http.get("/account", headers=cookies[leaked.key])).status_code == 200
    response = await revoke(account, leaked.key_id)
    assert (response.status_code, response.content) == (204, b"")

    for process in (twin, gw):  # at once: each request reads the list
        refused(await leaked.call("GET", "/account", at=process), 401, "UNAUTHORIZED")
        refused(await leaked.call("POST", KEYS, {"name": "again"}, at=process), 401, "UNAUTHORIZED")
        refused(await process.http.get("/account", headers=cookies[leaked.key]), 401, "UNAUTHORIZED")
        assert (await process.http.get("/account", headers=cookies[account.key])).status_code == 200
    with gw.redis.client() as client:
        assert not client.exists(api_key_key(digest(leaked.key)))
        assert leaked.key_id.encode() not in client.hgetall(api_keys_used_key(account.id))


@session
async def test_a_key_for_one_app_loses_its_right_when_the_app_moves(
    account: Account, gw: Gateway, backend: FakeAppBackend
) -> None:
    app = await account.app(backend)
    reader = await account.add_key(scope="read", app=app.name)
    assert (await reader.get(f"/account/apps/{app.name}")).status_code == 200
    record = {"account": (await gw.account()).id}
    for method, body in (("PUT", record), ("PUT", {"account": account.id}), ("DELETE", None)):
        assert (await gw.platform(method, f"apps/{app.name}", body)).is_success
        for path in ("/account/apps", f"/account/apps/{app.name}", "/account/deploys"):
            expected = 200 if body and body["account"] == account.id else 403
            assert (await reader.get(path)).status_code == expected, (method, path)


@session
async def test_a_key_may_revoke_itself_unless_it_is_the_last_one(account: Account, gw: Gateway) -> None:
    """And no key of another account."""
    other, stranger = await account.add_key(), await gw.account()
    [own] = [key["id"] for key in await list_keys(account) if key["name"] == "first"]
    [strange] = await list_keys(stranger)
    assert (await revoke(account, own)).status_code == 204
    refused(await account.get(KEYS), 401, "UNAUTHORIZED")
    for wrong in (own, strange["id"], "key_none", "%2e%2e", "*", "a%20b"):
        refused(await revoke(other, wrong), 404, "NOT_FOUND")
    assert [key["id"] for key in await list_keys(stranger)] == [strange["id"]]
    assert "another" in refused(await revoke(other, other.key_id), 409, "LAST_KEY")["message"]
    assert [key["id"] for key in await list_keys(other)] == [other.key_id]


@session
async def test_an_account_has_at_most_twenty_keys(account: Account, gw: Gateway) -> None:
    answers = await asyncio.gather(*(account.call("POST", KEYS, {"name": f"k{n}"}) for n in range(MAX_KEYS + 5)))
    made = [answer.json()["key"] for answer in answers if answer.status_code == 201]
    gw.confidential |= {*made}
    assert len(made) == MAX_KEYS - 1
    for answer in answers:
        if answer.status_code != 201:
            assert "revoke one first" in refused(answer, 400, "REQUEST_MALFORMED")["message"]
    with gw.redis.client() as client:
        finders = [client.get(key) for key in client.scan_iter("key:*", count=1000)]
    assert sum(account.id.encode() in finder for finder in finders) == MAX_KEYS, "refused keys leave nothing"
    # Operators can still help an account holder who lost all twenty.
    for n in range(MAX_KEYS_BY_OPERATORS - MAX_KEYS):
        response = await gw.platform("POST", f"accounts/{account.id}/keys", {"name": f"rescue {n}"})
        assert response.status_code == 201
        gw.confidential.add(response.json()["key"])
    refused(await gw.platform("POST", f"accounts/{account.id}/keys", {"name": "more"}), 400, "REQUEST_MALFORMED")
    assert (await Account(gw, account.id, response.json()["key"]).get()).status_code == 200


# -- last use ------------------------------------------------------------------------------------------------


@session
async def test_the_last_use_is_written_in_the_background(account: Account) -> None:
    created = await account.add_key()

    async def last_use() -> str | None:
        return next(key["lastUsedAt"] for key in await list_keys(account) if key["id"] == created.key_id)

    assert await last_use() is None
    before = now_iso()
    await created.get()
    used = await wait_until(last_use, 5)
    assert before[:-5] <= used <= now_iso()


async def test_many_requests_write_one_use_per_minute(local: Registry, raw: redis.asyncio.Redis) -> None:
    account, secret = await local.create_account("One", "free")
    second, written = 0, list[int]()
    keys = ApiKeys(local.store, clock=lambda: float(second), max_noted=10)
    key = await keys.identify(secret)
    for second in range(120):
        keys.note_use(key)
        keys.note_use(key)
        await keys.write_uses()
        if await raw.delete(api_keys_used_key(account.id)):
            written.append(second)
    assert written == [0, 60]
    for n in range(100):  # the number of noted uses is limited
        keys.note_use(KeyReference("acc", f"key_{n}"))
    assert len(keys._noted) <= 10
    assert len(keys._unwritten) <= 10
    await keys.write_uses()
    assert not keys._unwritten


# -- what Redis holds ----------------------------------------------------------------------------------------


async def test_an_interrupted_revocation_holds(local: Registry, proxy: Proxy) -> None:
    """Even if the process dies before it removes `key:<sha256>`, the key is refused."""
    account, _ = await local.create_account("One", "free")
    key = await local.api_keys.create(account.id, "second")
    async with opened(proxy.url) as store:
        proxy.hold_requests = api_key_key(digest(key.key)).encode()
        task = asyncio.create_task(ApiKeys(store).revoke(account.id, key.id))
        await wait_until(lambda: proxy.held)
        await cancel(task)
    reference = await local.api_keys.identify(key.key)
    assert reference is not None
    assert await local.api_keys.find(reference) is None


@session
async def test_operators_add_list_and_revoke_keys_even_the_last_one(
    account: Account, gw: Gateway, twin: Gateway
) -> None:
    """For an account holder who lost theirs."""
    path = f"accounts/{account.id}/keys"
    made = (await gw.platform("POST", path, {"name": "replacement"})).json()
    gw.confidential.add(made["key"])
    rows = (await gw.platform("GET", path)).json()
    assert [row["name"] for row in rows] == ["replacement", "first"]
    assert made["key"] not in json.dumps(rows)
    for row in rows:
        assert (await gw.platform("DELETE", f"{path}/{row['id']}")).status_code == 204
        refused(await gw.platform("DELETE", f"{path}/{row['id']}"), 404, "NOT_FOUND")
    record = (await gw.platform("GET", "audit?limit=2")).json()[1]
    found = (record["action"], record["target"], record["details"])
    assert found == ("revoke_key_of", account.id, {"key": rows[-1]["id"]})
    for at in (gw, twin):
        refused(await account.call("GET", KEYS, at=at), 401, "UNAUTHORIZED")
    for method, body in (("GET", None), ("POST", {"name": "x"})):
        refused(await gw.platform(method, "accounts/acc_nobody/keys", body), 404, "NOT_FOUND")
