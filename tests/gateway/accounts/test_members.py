"""Members of an account: their roles, their sessions, and the choice among several accounts."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from gateway.accounts import records
from gateway.accounts.access import Access
from gateway.accounts.api_keys import digest
from gateway.accounts.members import MAX_ACCOUNTS, MAX_MEMBERS, Members
from gateway.accounts.record_cache import RecordCache
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.api.deploys import _events
from gateway.deploys.runtime_log import RuntimeLog
from gateway.deploys.states import Deploys
from gateway.errors import LastOwner, RequestMalformed
from gateway.keys import memberships_key
from gateway.redis.client import Store
from gateway.services import ProcessState
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.visitor import Visitor

session = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def account(gw: Gateway) -> Account:
    return await gw.account()


@pytest_asyncio.fixture(loop_scope="session")
async def ada(gw: Gateway, account: Account) -> AsyncIterator[Visitor]:
    """An owner."""
    visitor = Visitor(gw)
    await put(account, email_of(visitor), "owner")
    visitor.become(email_of(visitor), account.id)
    async with visitor.http:
        yield visitor


def email_of(visitor: Visitor) -> str:
    return f"{visitor.name}@example.com"


async def put(account: Account, email: str, role: str) -> None:
    answer = await account.call("PUT", f"/account/members/{email}", {"role": role})
    assert answer.status_code == 200, answer.text


@session
async def test_members_are_added_changed_and_removed(account: Account, ada: Visitor) -> None:
    email, bob = email_of(ada), f"Bob-{secrets.token_hex(4)}@Example.com"
    for role in ("viewer", "developer"):
        view = (await ada.call("PUT", f"/account/members/{bob}", {"role": role})).json()
        assert (view["email"], view["role"]) == (bob.lower(), role)
    listed = (await account.get("/account/members")).json()
    assert {each["email"]: each["role"] for each in listed} == {email: "owner", bob.lower(): "developer"}
    assert view in listed
    assert listed == sorted(listed, key=lambda each: each["email"])
    for method, body in (("PUT", {"role": "viewer"}), ("DELETE", None)):
        refused(await ada.call(method, f"/account/members/{email.upper()}", body), 409, "LAST_OWNER")
    assert (await ada.call("DELETE", f"/account/members/{bob.upper()}")).status_code == 204
    refused(await ada.call("DELETE", f"/account/members/{bob}"), 404, "NOT_FOUND")
    changes = (await account.get("/account/audit")).json()
    mine = [(each["action"], each["who"], each["target"]) for each in changes if each["by"] == "session"]
    assert mine[:2] == [("remove_member", email, bob.upper()), ("set_member", email, bob)]
    for address, body in (
        ("nobody", {"role": "viewer"}),
        ("a@b.example", {"role": "admin"}),
        ("ü@b.example", {"role": "viewer"}),
    ):
        refused(await ada.call("PUT", f"/account/members/{address}", body), 400, "REQUEST_MALFORMED")


@session
async def test_a_role_holds_at_once_in_every_process(
    gw: Gateway, twin: Gateway, account: Account, ada: Visitor
) -> None:
    email = email_of(ada)
    await put(account, "other@example.com", "owner")
    cookie = {"Cookie": f"capsule_session={ada.token}", "Origin": twin.address}

    async def is_refused(status: int, at: Gateway) -> bool:
        answer = await at.http.post(
            "/account/webhook/test", json={"type": "x"}, headers={**cookie, "Origin": at.address}
        )
        return answer.status_code == status

    assert await is_refused(400, gw)
    assert await is_refused(400, twin)
    await put(account, email, "viewer")
    for at in (gw, twin):
        await wait_until(lambda at=at: is_refused(403, at), 1)
    assert (await account.call("DELETE", f"/account/members/{email}")).status_code == 204
    for at in (gw, twin):
        await wait_until(lambda at=at: is_refused(401, at), 1)
    # A session that ended does not come back with the membership.
    await put(account, email, "owner")
    for at in (gw, twin):
        assert await is_refused(401, at)


@session
async def test_one_of_several_accounts_is_chosen(gw: Gateway, account: Account) -> None:
    other, visitor = await gw.account(), Visitor(gw)
    email = email_of(visitor)
    await put(account, email, "viewer")
    await put(other, email, "owner")
    visitor.become(email)
    for path in ("/account", "/account/apps"):
        refused(await visitor.call("GET", path), 409, "ACCOUNT_NOT_CHOSEN")
    session = (await visitor.call("GET", "/dashboard/session")).json()
    assert {each["id"]: each["role"] for each in session["accounts"]} == {account.id: "viewer", other.id: "owner"}
    assert (session["account"], session["permitted"]) == (None, [])
    stranger = await gw.account()
    refused(await visitor.call("PUT", "/dashboard/session", {"account": stranger.id}), 404, "NOT_FOUND")
    evil = {"Origin": "https://evil.example"}
    refused(await visitor.call("PUT", "/dashboard/session", {"account": other.id}, **evil), 403, "CSRF_REFUSED")
    for chosen in (other, account):
        assert (await visitor.call("PUT", "/dashboard/session", {"account": chosen.id})).status_code == 204
        assert (await visitor.call("GET", "/account")).json()["id"] == chosen.id
    permitted = (await visitor.call("GET", "/dashboard/session")).json()["permitted"]
    assert "list_members" in permitted
    assert "set_member" not in permitted
    await visitor.log_in(account.key)
    refused(await visitor.call("PUT", "/dashboard/session", {"account": account.id}), 403, "NOT_PERMITTED")
    await visitor.http.aclose()


@session
@pytest.mark.parametrize("kind", ["person", "key"])
async def test_signing_out_everywhere(gw: Gateway, account: Account, ada: Visitor, kind: str) -> None:
    tokens = []
    for _ in range(2):
        ada.become(email_of(ada), account.id) if kind == "person" else await ada.log_in(account.key)
        tokens.append(ada.token)
    assert (await ada.call("DELETE", "/dashboard/session?everywhere=true")).status_code == 204
    for token in tokens:
        answer = await gw.http.get("/account", headers={"Cookie": f"capsule_session={token}"})
        refused(answer, 401, "UNAUTHORIZED")


@session
@pytest.mark.parametrize("role", ["viewer", "developer"])
async def test_members_may_leave(gw: Gateway, account: Account, ada: Visitor, role: str) -> None:
    visitor = Visitor(gw)
    email = email_of(visitor)
    await put(account, email, role)
    visitor.become(email, account.id)
    async with visitor.http:
        refused(await visitor.call("DELETE", f"/account/members/{email_of(ada)}"), 403, "NOT_PERMITTED")
        refused(await visitor.call("PUT", f"/account/members/{email}", {"role": "owner"}), 403, "NOT_PERMITTED")
        assert (await visitor.call("DELETE", f"/account/members/{email.upper()}")).status_code == 204
        refused(await visitor.call("GET", "/account"), 401, "UNAUTHORIZED")
    assert [each["email"] for each in (await account.get("/account/members")).json()] == [email_of(ada)]
    refused(await ada.call("DELETE", f"/account/members/{email_of(ada)}"), 409, "LAST_OWNER")
    [newest, *_] = (await account.get("/account/audit")).json()
    assert (newest["action"], newest["who"]) == ("remove_member", email)


@session
async def test_a_session_ends_with_the_provider_that_opened_it(account: Account, ada: Visitor) -> None:
    assert (await ada.call("GET", "/account")).status_code == 200
    ada.become(email_of(ada), account.id, "https://former.example.com")
    for path in ("/account", "/dashboard/session"):
        refused(await ada.call("GET", path), 401, "UNAUTHORIZED")


# -- the records -----------------------------------------------------------------------------------------------


@pytest.fixture
def members(store: Store) -> Members:
    return Members(store, RecordCache(store))


async def test_of_two_owners_who_leave_at_once_one_stays(members: Members) -> None:
    for email in ("a@example.com", "b@example.com"):
        await members.put("acc_1", email, "owner")
    leaving = (members.remove("acc_1", f"{name}@example.com") for name in "ab")
    results = await asyncio.gather(*leaving, return_exceptions=True)
    assert {*map(type, results)} == {bool, LastOwner}
    assert len(await members.list_members("acc_1")) == 1


@pytest.mark.parametrize("last", ["the removal", "the addition"])
async def test_a_member_who_is_added_and_removed_at_once_finds_the_account(store: Store, last: str) -> None:
    email, adding, removing = "a@example.com", Members(store, RecordCache(store)), Members(store, RecordCache(store))
    await adding.put("acc_1", "owner@example.com", "owner")
    await adding.put("acc_1", email, "viewer")

    async def add() -> None:
        await adding.put("acc_1", email, "viewer")

    async def remove() -> None:
        await removing.remove("acc_1", email)

    # The other change runs between the two writes of the last one.
    if last == "the removal":
        run_first(removing, "_unlist_account", add)
        await remove()
    else:
        run_first(adding, "_change", remove)
        await add()
    assert email in [each.email for each in await Members(store, RecordCache(store)).list_members("acc_1")]
    assert await store.get(memberships_key(digest(email))) == "acc_1"


def run_first(members: Members, step: str, other: Callable[[], Awaitable[None]]) -> None:
    original = getattr(members, step)

    async def run_both(*args: Any) -> Any:
        await other()
        return await original(*args)

    setattr(members, step, run_both)


async def test_a_removed_member_follows_no_log(store: Store, tmp_path: Path) -> None:
    registry, email, output = Registry(store, Vault("")), "a@example.com", tmp_path / "running" / "dep_1.output"
    await registry.members.put("acc_1", "owner@example.com", "owner")
    await registry.members.put("acc_1", email, "viewer")
    output.parent.mkdir()
    output.write_text("one\n")

    async def find_live_id(_: App) -> str:
        return "dep_1"

    account = records.Account(id="acc_1", name="One", plan="free", createdAt="")
    access = Access(account, by="session", role="viewer", email=email)
    app, log = App(id="app-1", name="app", account="acc_1", createdAt=""), RuntimeLog(str(tmp_path))
    deploys = cast(Deploys, SimpleNamespace(find_live_id=find_live_id))
    events = _events(access, registry, app, deploys, log, ProcessState(), 10)
    assert await anext(events) == b"data: one\n\n"
    await registry.members.remove("acc_1", email)
    output.write_text("one\ntwo\n")
    assert await anext(events, None) is None


async def test_the_limits(members: Members) -> None:
    for number in range(MAX_MEMBERS):
        await members.put("acc_1", f"{number}@example.com", "viewer")
    with pytest.raises(RequestMalformed, match="100 members"):
        await members.put("acc_1", "more@example.com", "viewer")
    await members.put("acc_1", "0@example.com", "owner")
    for number in range(MAX_ACCOUNTS):
        await members.put(f"acc_{number}_", "busy@example.com", "viewer")
    with pytest.raises(RequestMalformed, match="50 accounts"):
        await members.put("acc_2", "busy@example.com", "viewer")
    assert await members.find_role("acc_2", "busy@example.com") is None
