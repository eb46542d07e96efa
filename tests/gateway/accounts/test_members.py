"""Members of an account and invitations: roles, consent, sessions, and the choice among several accounts."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from gateway.accounts.access import Access
from gateway.accounts.api_keys import digest
from gateway.accounts.members import (
    INVITATION_SECONDS,
    MAX_ACCOUNTS,
    MAX_INVITATIONS,
    MAX_MEMBERS,
    Members,
)
from gateway.accounts.record_cache import RecordCache
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import SessionStore
from gateway.accounts.sessions import ACCOUNT
from gateway.accounts.vault import Vault
from gateway.errors import InvitationLimitReached, LastOwner, NotFound, RequestMalformed, Unauthorized
from gateway.events.notices import NoticeChoices, Notices
from gateway.keys import account_key, invitations_key, invited_by_key
from gateway.operations.memberships import Memberships
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.accounts import Account
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.stores import add_accounts, opened
from tests.support.visitor import Visitor

session = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def ada(gw: Gateway, account: Account) -> AsyncIterator[Visitor]:
    """An owner."""
    visitor = Visitor(gw)
    async with visitor.http:
        await visitor.join(account, email_of(visitor), "owner")
        yield visitor


@pytest_asyncio.fixture(loop_scope="session")
async def bob(gw: Gateway) -> AsyncIterator[Visitor]:
    """Somebody who has signed in, and belongs to no account."""
    visitor = Visitor(gw)
    visitor.become(email_of(visitor))
    async with visitor.http:
        yield visitor


def email_of(visitor: Visitor) -> str:
    return f"{visitor.name}@example.com"


async def put(account: Account | Visitor, email: str, role: str = "viewer") -> dict[str, Any]:
    """Invites the address, or changes its role."""
    answer = await account.call("PUT", f"/account/members/{email}", {"role": role})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def join(account: Account, email: str, role: str) -> None:
    visitor = Visitor(account.gateway)
    async with visitor.http:
        await visitor.join(account, email, role)


async def read_session(visitor: Visitor) -> dict[str, Any]:
    answer = await visitor.call("GET", "/dashboard/session")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def remove(account: Account, email: str) -> None:
    assert (await account.call("DELETE", f"/account/members/{email}")).status_code == 204


async def list_states(account: Account) -> dict[str, str]:
    return {each["email"]: each["state"] for each in (await account.get("/account/members")).json()}


def at_invitation(account: Account) -> str:
    return f"/dashboard/session/invitations/{account.id}"


@session
async def test_members_are_invited_changed_and_removed(account: Account, ada: Visitor) -> None:
    email, bob = email_of(ada), f"Bob-{secrets.token_hex(4)}@Example.com"
    for role in ("viewer", "developer"):
        view = (await ada.call("PUT", f"/account/members/{bob}", {"role": role})).json()
        assert (view["email"], view["role"], view["state"]) == (bob.lower(), role, "invited")
    listed = (await account.get("/account/members")).json()
    assert {each["email"]: each["role"] for each in listed} == {email: "owner", bob.lower(): "developer"}
    assert view in listed
    assert listed == sorted(listed, key=lambda each: each["email"])
    assert {each["email"]: (each["state"], each["endsAt"]) for each in listed}[email] == ("member", None)
    for method, body in (("PUT", {"role": "viewer"}), ("DELETE", None)):
        refused(await ada.call(method, f"/account/members/{email.upper()}", body), 409, "LAST_OWNER")
        for odd in ("nobody", "ü@b.example", *(f"a{odd}b@b.example" for odd in ("/", "%2F", "%0A", "%00"))):
            refused(await ada.call(method, f"/account/members/{odd}", body), 400, "REQUEST_MALFORMED")
    assert (await ada.call("DELETE", f"/account/members/{bob.upper()}")).status_code == 204
    refused(await ada.call("DELETE", f"/account/members/{bob}"), 404, "NOT_FOUND")
    refused(await ada.call("PUT", f"/account/members/{bob}", {"role": "admin"}), 400, "REQUEST_MALFORMED")
    changes = (await account.get("/account/audit")).json()
    mine = [(each["action"], each["who"], each["target"]) for each in changes if each["by"] == "session"]
    assert mine[:2] == [("remove_member", email, bob.upper()), ("set_member", email, bob)], "a refusal is no change"


@session
async def test_a_role_holds_at_once_in_every_process(
    gw: Gateway, twin: Gateway, account: Account, ada: Visitor
) -> None:
    email = email_of(ada)
    await join(account, "other@example.com", "owner")
    cookie = f"capsule_session={ada.token}"

    async def is_refused(status: int, at: Gateway) -> bool:
        headers = {"Cookie": cookie, "Origin": at.address}
        return (await at.http.post("/account/webhook/test", json={"type": "x"}, headers=headers)).status_code == status

    assert await is_refused(400, gw)
    assert await is_refused(400, twin)
    await put(account, email, "viewer")
    for at in (gw, twin):
        await wait_until(lambda at=at: is_refused(403, at), 1)
    await remove(account, email)
    for at in (gw, twin):
        await wait_until(lambda at=at: is_refused(401, at), 1)
    # A session that ended does not come back with the membership.
    await join(account, email, "owner")
    for at in (gw, twin):
        assert await is_refused(401, at)


@session
async def test_one_of_several_accounts_is_chosen(gw: Gateway, account: Account, bob: Visitor) -> None:
    other, email = await gw.account(), email_of(bob)
    await join(other, owner := f"first-{email}", "owner")
    await bob.join(account, email, "viewer")
    await bob.join(other, email, "owner")
    bob.become(email)
    session = await read_session(bob)
    error = refused(await bob.call("GET", "/account"), 409, "ACCOUNT_NOT_CHOSEN")
    assert error["accounts"] == session["accounts"]
    # Names can be chosen to be mistaken for others; ids and addresses of owners cannot.
    found = {each["id"]: (each["owner"], each["role"]) for each in session["accounts"]}
    assert found == {account.id: (None, "viewer"), other.id: (owner, "owner")}
    assert (session["account"], session["permitted"]) == (None, [])
    stranger = await gw.account()
    refused(await bob.call("PUT", "/dashboard/session", {"account": stranger.id}), 404, "NOT_FOUND")
    evil = {"Origin": "https://evil.example"}
    refused(await bob.call("PUT", "/dashboard/session", {"account": other.id}, **evil), 403, "CSRF_REFUSED")
    for chosen in (other, account):
        assert (await bob.call("PUT", "/dashboard/session", {"account": chosen.id})).status_code == 204
        assert (await bob.call("GET", "/account")).json()["id"] == chosen.id
    permitted = (await read_session(bob))["permitted"]
    assert "list_members" in permitted
    assert "set_member" not in permitted
    await bob.log_in(account.key)
    refused(await bob.call("PUT", "/dashboard/session", {"account": account.id}), 403, "NOT_PERMITTED")


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
    ada.become(email_of(ada), account.id, "https://former.example.com")
    for path in ("/account", "/dashboard/session"):
        refused(await ada.call("GET", path), 401, "UNAUTHORIZED")


@session
async def test_members_may_leave(account: Account, ada: Visitor, bob: Visitor) -> None:
    email = email_of(bob)
    await bob.join(account, email, "viewer")
    refused(await bob.call("DELETE", f"/account/members/{email_of(ada)}"), 403, "NOT_PERMITTED")
    refused(await bob.call("PUT", f"/account/members/{email}", {"role": "owner"}), 403, "NOT_PERMITTED")
    assert (await bob.call("DELETE", f"/account/members/{email.upper()}")).status_code == 204
    refused(await bob.call("GET", "/account"), 401, "UNAUTHORIZED")
    assert await list_states(account) == {email_of(ada): "member"}
    [newest, *_] = (await account.get("/account/audit")).json()
    assert (newest["action"], newest["who"]) == ("remove_member", email)


# -- invitations -----------------------------------------------------------------------------------------------


@session
async def test_nobody_is_a_member_until_they_accept(account: Account, ada: Visitor, bob: Visitor) -> None:
    email, name = email_of(bob), (await account.get()).json()["name"]
    made = (await ada.call("PUT", f"/account/members/{email.upper()}", {"role": "developer"})).json()
    assert (made["email"], made["role"], made["state"]) == (email, "developer", "invited")
    lasts = datetime.fromisoformat(made["endsAt"]) - datetime.fromisoformat(made["since"])
    assert lasts == timedelta(seconds=INVITATION_SECONDS)
    refused(await bob.call("GET", "/account"), 409, "ACCOUNT_NOT_CHOSEN")
    refused(await bob.call("PUT", "/dashboard/session", {"account": account.id}), 404, "NOT_FOUND")
    found = await read_session(bob)
    assert (found["account"], found["accounts"], found["permitted"]) == (None, [], [])
    offer = {"account": account.id, "name": name, "by": email_of(ada), "role": "developer"}
    assert found["invitations"] == [offer | {"at": made["since"], "endsAt": made["endsAt"]}]
    # Its role can be changed until then.
    assert (await put(account, email, "viewer"))["endsAt"] == made["endsAt"]
    for _ in range(2):  # it may be repeated
        accepted = await bob.call("PUT", at_invitation(account))
        choice = {"id": account.id, "name": name, "role": "viewer", "owner": email_of(ada)}
        assert (accepted.status_code, accepted.json()) == (200, choice)
    assert (await bob.call("GET", "/account")).json()["id"] == account.id
    found = await read_session(bob)
    assert (found["account"], found["role"], found["invitations"]) == (account.id, "viewer", [])
    assert await list_states(account) == {email: "member", email_of(ada): "member"}
    trail = [(each["action"], each["who"], each["target"]) for each in (await account.get("/account/audit")).json()]
    assert trail[0] == ("accept_invitation", email, email)
    assert ("set_member", email_of(ada), email.upper()) in trail


@session
async def test_an_invitation_is_declined_or_canceled(account: Account, bob: Visitor) -> None:
    email = email_of(bob)
    assert (await put(account, email))["state"] == "invited"
    assert (await read_session(bob))["invitations"][0]["by"] == "API key"
    assert (await bob.call("DELETE", at_invitation(account))).status_code == 204
    await put(account, email)
    await remove(account, email)
    before = (await account.get("/account/audit")).json()
    changes = [(each["action"], each["count"]) for each in before][:3]
    assert changes == [("remove_member", 1), ("decline_invitation", 1), ("set_member", 2)]
    for method in ("PUT", "DELETE"):
        refused(await bob.call(method, at_invitation(account)), 404, "NOT_FOUND")
    assert (await account.get("/account/audit")).json() == before, "a stranger's answer leaves no trace"
    assert await list_states(account) == {}
    assert (await read_session(bob))["invitations"] == []
    with account.gateway.redis.client() as client:
        assert not client.exists(invitations_key(account.id), invited_by_key(digest(email)))


@session
async def test_only_the_person_who_is_invited_answers(account: Account, ada: Visitor, bob: Visitor) -> None:
    """No page of another site, no API key, and nobody else."""
    await put(account, email_of(bob))
    key = f"Bearer {account.key}"
    for method in ("PUT", "DELETE"):
        for headers, status, code in (
            ({"Origin": "https://evil.example"}, 403, "CSRF_REFUSED"),
            ({"Cookie": "capsule_session=x", "Authorization": key}, 401, "UNAUTHORIZED"),
        ):
            refused(await bob.call(method, at_invitation(account), **headers), status, code)
    refused(await ada.call("DELETE", at_invitation(account)), 404, "NOT_FOUND")
    assert (await ada.call("GET", "/account")).status_code == 200, "she did not leave"
    await ada.log_in(account.key)
    assert (await read_session(ada))["invitations"] == []
    for method in ("PUT", "DELETE"):
        refused(await ada.call(method, at_invitation(account)), 403, "NOT_PERMITTED")
    assert [each["account"] for each in (await read_session(bob))["invitations"]] == [account.id]


@session
@pytest.mark.parametrize(
    "end", ["the owner leaves", "the owner is demoted", "the key is revoked", "operators revoke it"]
)
async def test_invitations_end_with_the_owner_or_key_that_made_them(
    gw: Gateway, account: Account, ada: Visitor, bob: Visitor, end: str
) -> None:
    """And with the sessions of the key, or who has stolen it would become an owner after it is revoked."""
    stolen, email, thief = await account.add_key("stolen"), email_of(ada), email_of(bob)
    await join(account, f"chief-{email}", "owner")
    session_of_key = Visitor(gw)
    async with session_of_key.http:
        await session_of_key.log_in(stolen.key)
        inviting: list[Any] = [ada, account, stolen, session_of_key]
        for number, by in enumerate(inviting):
            await put(by, f"{number}-{thief}", "owner")
    await put(ada if "owner" in end else stolen, thief, "owner")
    if end == "the owner leaves":
        await remove(account, email)
    elif end == "the owner is demoted":
        await put(account, email, "developer")
    elif end == "the key is revoked":
        assert (await ada.call("DELETE", f"/account/keys/{stolen.key_id}")).status_code == 204
    else:
        await gw.platform("DELETE", f"accounts/{account.id}/keys/{stolen.key_id}")
    refused(await bob.call("PUT", at_invitation(account)), 404, "NOT_FOUND")
    listed = {email for email, state in (await list_states(account)).items() if state == "invited"}
    assert listed == {f"{number}-{thief}" for number in ((1, 2, 3) if "owner" in end else (0, 1))}


@session
async def test_invitations_end_with_the_account(gw: Gateway, bob: Visitor) -> None:
    """One that is suspended makes no new ones."""
    account = await gw.account()
    await put(account, email_of(bob))
    await gw.platform("PUT", f"accounts/{account.id}/suspension", {"reason": "abuse"})
    answer = await account.call("PUT", "/account/members/other@example.com", {"role": "viewer"})
    refused(answer, 403, "APP_SUSPENDED")
    assert (await put(account, email_of(bob), "developer"))["role"] == "developer"
    await gw.platform("DELETE", f"accounts/{account.id}/suspension")
    name = (await account.get()).json()["name"]
    assert (await account.call("POST", "/account/deletion", {"name": name})).status_code == 202
    assert (await read_session(bob))["invitations"] == []
    refused(await bob.call("PUT", at_invitation(account)), 404, "NOT_FOUND")
    await account.call("DELETE", "/account/deletion")
    assert [each["account"] for each in (await read_session(bob))["invitations"]] == [account.id]


# -- what one account may do to another's people ----------------------------------------------------------------


@session
async def test_a_refused_removal_ends_nothing(account: Account, ada: Visitor, bob: Visitor) -> None:
    """Of somebody who is no member, and of the last owner: neither sessions nor notices."""
    choices = NoticeChoices(budget=True)
    async with opened(account.gateway.redis.url) as store:
        for who, status, code in ((bob, 404, "NOT_FOUND"), (ada, 409, "LAST_OWNER")):
            await Notices(store).choose(account.id, email_of(who), choices)
            refused(await account.call("DELETE", f"/account/members/{email_of(who)}"), status, code)
            assert await Notices(store).read_choices(account.id, email_of(who)) == choices
    assert (await read_session(ada))["account"] == account.id
    assert (await read_session(bob))["accounts"] == []


@session
async def test_a_removal_ends_the_sessions_for_this_account_alone(gw: Gateway, account: Account, ada: Visitor) -> None:
    email, other, third = email_of(ada), await gw.account(), await gw.account()
    for each in (other, third):
        await join(each, email, "owner")
    tokens = {}
    for chosen in (account.id, other.id, ""):
        ada.become(email, chosen)
        tokens[chosen] = ada.token
    await join(account, "other@example.com", "owner")
    await remove(account, email)
    for chosen, token in tokens.items():
        status = 401 if chosen == account.id else 200
        ada.http.cookies.set(ACCOUNT, token, domain="127.0.0.1", path="/")
        assert (await ada.call("GET", "/dashboard/session")).status_code == status, chosen
        if chosen != account.id:
            assert {each["id"] for each in (await read_session(ada))["accounts"]} == {other.id, third.id}


# -- the records -----------------------------------------------------------------------------------------------


@pytest.fixture
async def members(one: Store) -> Members:
    return Members(one, RecordCache(one))


@pytest.fixture
async def one(store: Store) -> Store:
    """A store with the account `acc_1`."""
    await add_accounts(store, "acc_1")
    return store


async def test_of_two_owners_who_leave_at_once_one_stays(members: Members) -> None:
    for email in ("a@example.com", "b@example.com"):
        await members.put("acc_1", email, "owner")
    leaving = (members.remove("acc_1", f"{name}@example.com") for name in "ab")
    results = await asyncio.gather(*leaving, return_exceptions=True)
    assert sorted(map(str, results), key=len) == ["True", str(LastOwner())]
    assert len(await members.list_members("acc_1")) == 1


@pytest.mark.parametrize("moment", ["while the key invites", "before an interruption"])
async def test_an_invitation_of_a_key_that_is_revoked_meanwhile_ends(one: Store, moment: str) -> None:
    """Otherwise, whoever has stolen it could make an owner of somebody who was invited as a viewer."""
    registry = Registry(one, Vault(""))
    key = await registry.api_keys.create("acc_1", "stolen")
    account = await registry.account("acc_1")
    assert account is not None
    memberships = Memberships(Settings(), registry, SessionStore(one), Notices(one))
    await registry.members.set_role("acc_1", "a@example.com", "viewer", "owner@example.com")
    access = Access(account, key_id=key.id)
    if moment == "while the key invites":
        await registry.revoke_key("acc_1", key.id, even_last=True)
        with pytest.raises(Unauthorized):
            await memberships.place(access, "a@example.com", "owner")
    else:
        await memberships.place(access, "a@example.com", "owner")
        await registry.api_keys.revoke("acc_1", key.id, even_last=True)
        with pytest.raises(NotFound):
            await registry.revoke_key("acc_1", key.id)
    assert await registry.members.list_members("acc_1") == []


async def test_an_invitation_ends_by_itself(one: Store, members: Members) -> None:
    """The next change forgets it, and the record goes with the last one."""
    email = "a@example.com"
    await members.set_role("acc_1", "owner@example.com", "viewer", "API key")
    await Members(one, RecordCache(one), invitation_seconds=1).set_role("acc_1", email, "viewer", "API key")
    for key in (invitations_key("acc_1"), invited_by_key(digest(email))):
        assert 0 < await one.client.ttl(key) <= 14 * 86_400 + 1  # a part of a second counts as one
    await wait_until(lambda: members.list_members("acc_1"), 3, holds=lambda listed: len(listed) == 1)  # the owner's
    with pytest.raises(NotFound):
        await members.accept("acc_1", email)
    await members.remove("acc_1", "owner@example.com")
    await wait_until(one.list_keys, 3, holds=lambda names: names == {account_key("acc_1")})


async def test_the_limits(one: Store, members: Members) -> None:
    await add_accounts(one, "acc_2", "acc_3", *(f"acc_{number}_" for number in range(MAX_ACCOUNTS)))
    for number in range(MAX_MEMBERS):
        await members.put("acc_1", f"{number}@example.com", "viewer")
    with pytest.raises(RequestMalformed, match="100 members"):
        await members.put("acc_1", "more@example.com", "viewer")
    with pytest.raises(RequestMalformed, match="100 members"):
        await members.set_role("acc_1", "more@example.com", "viewer", "API key")
    await members.put("acc_1", "0@example.com", "owner")
    for number in range(MAX_ACCOUNTS):
        await members.put(f"acc_{number}_", "busy@example.com", "viewer")
    with pytest.raises(RequestMalformed, match="50 accounts"):
        await members.put("acc_2", "busy@example.com", "viewer")
    # Invitations do not count; who accepts too many keeps the invitation.
    await members.set_role("acc_2", "busy@example.com", "viewer", "API key")
    with pytest.raises(RequestMalformed, match="50 accounts"):
        await members.accept("acc_2", "busy@example.com")
    assert (await members.require_invitation("acc_2", "busy@example.com")).role == "viewer"
    assert await members.find_role("acc_2", "busy@example.com") is None
    for number in range(MAX_INVITATIONS):
        await members.set_role("acc_3", f"{number}@example.com", "viewer", "API key")
    with pytest.raises(InvitationLimitReached):
        await members.set_role("acc_3", "more@example.com", "viewer", "API key")
    await members.set_role("acc_3", "0@example.com", "owner", "API key")
    await members.remove("acc_3", "0@example.com")
    await members.set_role("acc_3", "more@example.com", "viewer", "API key")
