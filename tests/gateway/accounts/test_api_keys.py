"""API keys are created, listed and revoked over HTTP, at two processes, and their uses are written."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis.asyncio

from gateway.accounts.api_keys import MAX_KEYS, MAX_KEYS_BY_OPERATORS, ApiKeys, KeyReference, ListedKey, digest
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import ACCOUNT
from gateway.accounts.vault import Vault
from gateway.errors import LastKey
from gateway.ids import now_iso
from gateway.keys import api_key_key, api_keys_key, api_keys_used_key
from tests.support.accounts import Account
from tests.support.background import cancel
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from tests.support.visitor import Visitor, new_address

session = pytest.mark.asyncio(loop_scope="session")
KEYS = "/account/keys"


class Holder:
    """An account holder with one of the account's keys."""

    def __init__(self, gw: Gateway, account_id: str, key: str) -> None:
        self.gw, self.id, self.key = gw, account_id, key

    async def call(
        self, method: str, path: str = KEYS, body: Any = None, *, at: Gateway | None = None
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        return await (at or self.gw).http.request(method, path, json=body, headers=headers)

    async def create(self, name: str = "ci") -> dict[str, str]:
        response = await self.call("POST", body={"name": name})
        assert response.status_code == 201, response.text
        self.gw.confidential.add(response.json()["key"])
        return response.json()

    async def list(self) -> list[dict[str, Any]]:
        response = await self.call("GET")
        assert response.status_code == 200, response.text
        return response.json()

    async def revoke(self, key_id: str, **options: Any) -> httpx.Response:
        return await self.call("DELETE", f"{KEYS}/{key_id}", **options)

    def with_key(self, key: str) -> "Holder":
        return Holder(self.gw, self.id, key)


def holder_of(account: Account) -> Holder:
    return Holder(account.gateway, account.id, account.key)


@pytest_asyncio.fixture(loop_scope="session")
async def holder(gw: Gateway) -> Holder:
    return holder_of(await gw.account())


# -- over HTTP -----------------------------------------------------------------------------------------------


@session
async def test_a_key_is_shown_once(holder: Holder) -> None:
    created = await holder.create("  nightly build  ")
    assert created.keys() == {"id", "name", "scope", "app", "key", "createdAt", "by"}
    assert created["name"] == "nightly build"
    assert created["key"].startswith("csk_")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", created["createdAt"])
    listed = (await holder.call("GET")).text
    assert created["id"] in listed
    assert created["key"] not in listed
    assert digest(created["key"]) not in listed
    assert (await holder.with_key(created["key"]).call("GET", "/account")).json()["id"] == holder.id


@session
async def test_the_key_made_with_the_account_is_listed(holder: Holder) -> None:
    second = await holder.create("second")
    newest, first = await holder.list()
    assert [newest["id"], newest["name"]] == [second["id"], "second"]
    assert first.keys() == {"id", "name", "scope", "app", "createdAt", "by", "lastUsedAt"}
    assert first["name"] == "first"


@session
async def test_who_made_a_key(holder: Holder) -> None:
    """A key, a person who signed in, or an operator; nobody is known of the one made with the account."""
    [first] = await holder.list()
    made = {"by a key": await holder.create("by a key")}
    made["by another"] = await holder.with_key(made["by a key"]["key"]).create("by another")
    visitor = Visitor(holder.gw)
    email = f"{visitor.name}@example.com"
    async with opened(holder.gw.redis.url) as store:
        await Registry(store, Vault("")).members.put(holder.id, email, "owner")
    visitor.become(email, holder.id)
    made["by a person"] = (await visitor.call("POST", KEYS, {"name": "by a person"})).json()
    await visitor.http.aclose()
    made["by an operator"] = (await holder.gw.platform("POST", f"accounts/{holder.id}/keys", {"name": "x"})).json()
    holder.gw.confidential |= {each["key"] for each in made.values()}
    expected = {
        "by a key": f"first ({first['id']})",
        "by another": f"by a key ({made['by a key']['id']})",
        "by a person": email,
        "by an operator": "operator",
    }
    assert {name: each["by"] for name, each in made.items()} == expected
    listed = {key["id"]: key["by"] for key in await holder.list()}
    assert listed == {first["id"]: None, **{made[name]["id"]: by for name, by in expected.items()}}
    assert {
        key["id"]: key["by"] for key in (await holder.gw.platform("GET", f"accounts/{holder.id}/keys")).json()
    } == listed


@session
async def test_a_key_from_before_its_maker_was_recorded(holder: Holder) -> None:
    created = await holder.create()
    with holder.gw.redis.client() as client:
        record = json.loads(client.hget(api_keys_key(holder.id), created["id"]))
        assert record.pop("by")
        client.hset(api_keys_key(holder.id), created["id"], json.dumps(record))
    assert (await holder.list())[0]["by"] is None


@session
async def test_the_key_of_a_registration_is_listed(gw: Gateway) -> None:
    made = (await gw.http.post("/register", json={"name": "Somebody"})).json()
    gw.confidential.add(made["apiKey"])
    assert [key["name"] for key in await Holder(gw, made["id"], made["apiKey"]).list()] == ["first"]


@session
async def test_a_revoked_key_is_refused_at_once_in_every_process(holder: Holder, twin: Gateway) -> None:
    leaked = holder.with_key((await holder.create("leaked"))["key"])
    for process in (holder.gw, twin):
        assert (await leaked.call("GET", "/account", at=process)).status_code == 200
    [key_id] = [key["id"] for key in await holder.list() if key["name"] == "leaked"]
    response = await holder.revoke(key_id)
    assert (response.status_code, response.content) == (204, b"")

    for process in (twin, holder.gw):  # at once: each request reads the list
        refused(await leaked.call("GET", "/account", at=process), 401, "UNAUTHORIZED")
        refused(await leaked.call("POST", body={"name": "again"}, at=process), 401, "UNAUTHORIZED")
    refused(await holder.revoke(key_id), 404, "NOT_FOUND")
    with holder.gw.redis.client() as client:
        assert not client.exists(api_key_key(digest(leaked.key)))
        assert key_id.encode() not in client.hgetall(api_keys_used_key(holder.id))


@session
async def test_a_key_may_revoke_itself(holder: Holder) -> None:
    other = await holder.create()
    [own] = [key["id"] for key in await holder.list() if key["name"] == "first"]
    assert (await holder.revoke(own)).status_code == 204
    refused(await holder.call("GET"), 401, "UNAUTHORIZED")
    assert [key["id"] for key in await holder.with_key(other["key"]).list()] == [other["id"]]


@session
async def test_the_last_key_stays(holder: Holder) -> None:
    [key] = await holder.list()
    assert "another" in refused(await holder.revoke(key["id"]), 409, "LAST_KEY")["message"]
    assert (await holder.call("GET")).status_code == 200


@session
@pytest.mark.parametrize("count", [2, 4])
async def test_all_keys_revoked_at_once_leave_one(gw: Gateway, twin: Gateway, count: int) -> None:
    """Two requests at two processes must not revoke each other's last key."""
    for _ in range(10):
        holder = holder_of(await gw.account())
        owned = [holder.key, *[(await holder.create())["key"] for _ in range(count - 1)]]
        listed = await holder.list()
        assert len(listed) == count
        # Each key is revoked by each of the keys, at either process.
        answers = await asyncio.gather(
            *(
                holder.with_key(secret).revoke(key["id"], at=process)
                for key in listed
                for secret, process in zip(owned, (gw, twin) * 2, strict=False)
            )
        )
        statuses = Counter(answer.status_code for answer in answers)
        alive = [secret for secret in owned if await works(holder, secret)]
        assert alive, "the account has no key left"
        assert statuses[204] == count - len(alive)
        assert statuses.keys() <= {204, 401, 404, 409}


async def works(holder: Holder, secret: str) -> bool:
    return (await holder.with_key(secret).call("GET", "/account")).status_code == 200


@session
async def test_an_account_has_at_most_twenty_keys(holder: Holder, gw: Gateway) -> None:
    answers = await asyncio.gather(*(holder.call("POST", body={"name": f"k{n}"}) for n in range(MAX_KEYS + 5)))
    made = [answer.json()["key"] for answer in answers if answer.status_code == 201]
    gw.confidential |= {*made}
    assert len(made) == MAX_KEYS - 1
    for answer in answers:
        if answer.status_code != 201:
            assert "revoke one first" in refused(answer, 400, "REQUEST_MALFORMED")["message"]
    assert len(await holder.list()) == MAX_KEYS
    with gw.redis.client() as client:
        finders = [client.get(key) for key in client.scan_iter("key:*", count=1000)]
    assert len([finder for finder in finders if holder.id.encode() in finder]) == MAX_KEYS, "refused keys leave nothing"
    # Operators can still help an account holder who lost all twenty.
    for n in range(MAX_KEYS_BY_OPERATORS - MAX_KEYS):
        response = await gw.platform("POST", f"accounts/{holder.id}/keys", {"name": f"rescue {n}"})
        assert response.status_code == 201
        gw.confidential.add(response.json()["key"])
    refused(await gw.platform("POST", f"accounts/{holder.id}/keys", {"name": "more"}), 400, "REQUEST_MALFORMED")
    assert await works(holder, response.json()["key"])


@session
@pytest.mark.parametrize(
    "body",
    [None, {}, {"name": None}, {"name": ""}, {"name": "  "}, {"name": 1}, {"name": "x" * 101}, {"name": "x", "id": 1}],
)
async def test_invalid_names(holder: Holder, body: Any) -> None:
    for response in (
        await holder.call("POST", body=body),
        await holder.gw.platform("POST", f"accounts/{holder.id}/keys", body),
    ):
        error = refused(response, 400, "REQUEST_MALFORMED")
        assert body is None or "name" in error["message"] or "id" in error["message"]
    assert len(await holder.list()) == 1


@session
async def test_operators_add_a_key_for_an_account_holder_who_lost_theirs(holder: Holder, gw: Gateway) -> None:
    response = await gw.platform("POST", f"accounts/{holder.id}/keys", {"name": "replacement"})
    assert response.status_code == 201
    assert response.json().keys() == {"id", "name", "scope", "app", "key", "createdAt", "by"}
    gw.confidential.add(response.json()["key"])
    rescued = holder.with_key(response.json()["key"])
    [lost] = [key["id"] for key in await rescued.list() if key["name"] == "first"]
    assert (await rescued.revoke(lost)).status_code == 204
    refused(await holder.call("GET"), 401, "UNAUTHORIZED")
    refused(await gw.platform("POST", "accounts/acc_nobody/keys", {"name": "x"}), 404, "NOT_FOUND")
    answer = await holder.with_key(rescued.key).call("POST", f"/platform/accounts/{holder.id}/keys", {"name": "x"})
    refused(answer, 401, "UNAUTHORIZED")


@session
async def test_another_accounts_keys_cannot_be_revoked(holder: Holder, gw: Gateway) -> None:
    other = holder_of(await gw.account())
    await other.create()
    for key in await other.list():
        refused(await holder.revoke(key["id"]), 404, "NOT_FOUND")
    for wrong in ("key_none", "%2e%2e", "*", "a%20b"):
        assert (await holder.revoke(wrong)).status_code == 404
    assert len(await other.list()) == 2
    assert len(await holder.list()) == 1


# -- sessions ------------------------------------------------------------------------------------------------


@session
async def test_a_session_ends_with_its_key(holder: Holder, gw: Gateway, twin: Gateway) -> None:
    """Otherwise the session of a leaked key would last for up to twelve hours."""
    leaked = await holder.create("leaked")
    cookies = {}
    for secret in (holder.key, leaked["key"]):
        headers = {"Origin": gw.address, "X-Forwarded-For": new_address()}
        opened = await gw.http.post("/dashboard/session", json={"apiKey": secret}, headers=headers)
        assert opened.status_code == 204
        cookies[secret] = {"Cookie": f"{ACCOUNT}={opened.cookies[ACCOUNT]}"}
        gw.confidential.add(opened.cookies[ACCOUNT])
    gw.http.cookies.clear()
    for process in (gw, twin):
        assert (await process.http.get("/account", headers=cookies[leaked["key"]])).status_code == 200
    assert (await holder.revoke(leaked["id"])).status_code == 204
    for process in (twin, gw):
        refused(await process.http.get("/account", headers=cookies[leaked["key"]]), 401, "UNAUTHORIZED")
        assert (await process.http.get("/account", headers=cookies[holder.key])).status_code == 200


@session
async def test_a_session_manages_keys(holder: Holder, gw: Gateway) -> None:
    own = {"Origin": gw.address, "X-Forwarded-For": new_address()}
    async with httpx.AsyncClient(base_url=gw.address, trust_env=False) as browser:
        assert (await browser.post("/dashboard/session", json={"apiKey": holder.key}, headers=own)).status_code == 204
        gw.confidential.add(browser.cookies[ACCOUNT])
        evil = {"Origin": "https://evil.example"}
        refused(await browser.post(KEYS, json={"name": "x"}, headers=evil), 403, "CSRF_REFUSED")
        created = (await browser.post(KEYS, json={"name": "x"}, headers=own)).json()
        gw.confidential.add(created["key"])
        refused(await browser.delete(f"{KEYS}/{created['id']}", headers=evil), 403, "CSRF_REFUSED")
        assert (await browser.delete(f"{KEYS}/{created['id']}", headers=own)).status_code == 204


# -- last use ------------------------------------------------------------------------------------------------


@session
async def test_the_last_use_is_written_in_the_background(holder: Holder, gw: Gateway) -> None:
    created = await holder.create()

    async def last_use() -> str | None:
        return next(key["lastUsedAt"] for key in await holder.list() if key["id"] == created["id"])

    assert await last_use() is None
    before = now_iso()
    await holder.with_key(created["key"]).call("GET", "/account")
    used = await wait_until(last_use, 5)
    assert before[:-5] <= used <= now_iso()


async def test_many_requests_write_one_use_per_minute(local: Registry, raw: redis.asyncio.Redis) -> None:
    account, secret = await local.create_account("One", "free")
    second, written = 0, list[int]()
    keys = ApiKeys(local.store, clock=lambda: float(second))
    key = await keys.identify(secret)
    for second in range(120):
        for _ in range(50):
            keys.note_use(key)
        await keys.write_uses()
        if await raw.delete(api_keys_used_key(account.id)):
            written.append(second)
    assert written == [0, 60]


async def test_a_use_waits_while_redis_fails(valkey: RedisServer, local: Registry, proxy: Any) -> None:
    account, secret = await local.create_account("One", "free")
    key = await local.api_keys.identify(secret)
    async with opened(proxy.url) as store:
        away = ApiKeys(store)
        away.note_use(key)
        proxy.go_down()
        await away.write_uses()  # raises nothing, which would end the background task
        proxy.down = False
        assert (await only_key(local, account.id)).lastUsedAt is None
        await away.write_uses()
        assert (await only_key(local, account.id)).lastUsedAt is not None


async def only_key(registry: Registry, account_id: str) -> ListedKey:
    [key] = await registry.list_keys(account_id)
    return key


async def test_a_late_use_of_a_revoked_key_is_not_written(local: Registry, raw: redis.asyncio.Redis) -> None:
    account, first = await local.create_account("One", "free")
    key = await local.api_keys.create(account.id, "second")
    local.api_keys.note_use(await local.api_keys.identify(key.key))
    local.api_keys.note_use(await local.api_keys.identify(first))
    await local.api_keys.revoke(account.id, key.id)
    await local.api_keys.write_uses()
    assert key.id not in await raw.hgetall(api_keys_used_key(account.id))
    assert len(await raw.hgetall(api_keys_used_key(account.id))) == 1


async def test_the_number_of_noted_uses_is_limited(local: Registry) -> None:
    keys = ApiKeys(local.store, max_noted=10)
    for n in range(100):
        keys.note_use(KeyReference("acc", f"key_{n}"))
    assert len(keys._noted) <= 10
    assert len(keys._unwritten) <= 10
    await keys.write_uses()
    assert not keys._unwritten


# -- what Redis holds ----------------------------------------------------------------------------------------


async def interrupt(work: Coroutine[Any, Any, Any], proxy: Proxy, key: str) -> None:
    """Ends the work as soon as it sends a request with this key, which does not arrive."""
    proxy.hold_requests = key.encode()
    task = asyncio.create_task(work)
    await wait_until(lambda: proxy.held)
    await cancel(task)


async def test_an_interrupted_revocation_holds(local: Registry, proxy: Proxy) -> None:
    """Even if the process dies before it removes `key:<sha256>`, the key is refused."""
    account, _ = await local.create_account("One", "free")
    key = await local.api_keys.create(account.id, "second")
    async with opened(proxy.url) as store:
        await interrupt(ApiKeys(store).revoke(account.id, key.id), proxy, api_key_key(digest(key.key)))
    reference = await local.api_keys.identify(key.key)
    assert reference is not None
    assert await local.api_keys.find(reference) is None


async def test_an_interrupted_creation_does_not_count(local: Registry, proxy: Proxy) -> None:
    """A key that nobody has seen must not be the account's last one."""
    account, first = await local.create_account("One", "free")
    async with opened(proxy.url) as store:
        await interrupt(ApiKeys(store).create(account.id, "second"), proxy, api_keys_key(account.id))
    with pytest.raises(LastKey):
        await local.api_keys.revoke(account.id, (await only_key(local, account.id)).id)
    assert await local.api_keys.identify(first) is not None


@session
async def test_operators_list_and_revoke_keys_even_the_last_one(gw: Gateway, twin: Gateway) -> None:
    account = await gw.account()
    holder = Holder(gw, account.id, account.key)
    second = await holder.create("second")
    rows = (await gw.platform("GET", f"accounts/{account.id}/keys")).json()
    assert [row["name"] for row in rows] == ["second", "first"]
    assert second["key"] not in json.dumps(rows)
    for row in rows:
        path = f"accounts/{account.id}/keys/{row['id']}"
        assert (await gw.platform("DELETE", path)).status_code == 204
        refused(await gw.platform("DELETE", path), 404, "NOT_FOUND")
    record, *_ = (await gw.platform("GET", "audit?limit=2")).json()[1:]
    assert (record["action"], record["target"], record["details"]) == (
        "revoke_key_of",
        account.id,
        {"key": rows[-1]["id"]},
    )
    for at in (gw, twin):
        refused(await holder.call("GET", at=at), 401, "UNAUTHORIZED")
    assert (await gw.platform("GET", f"accounts/{account.id}/keys")).json() == []
    refused(await gw.platform("GET", "accounts/acc_nobody/keys"), 404, "NOT_FOUND")
    refused(await account.call("DELETE", f"/platform/accounts/{account.id}/keys/x"), 401, "UNAUTHORIZED")
