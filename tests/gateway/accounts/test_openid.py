"""Sign-in with OpenID Connect: the flow, and what a provider, a browser or a third party may try."""

import asyncio
import base64
import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from gateway.accounts.openid import SIGN_IN_SECONDS, Identity, OpenId, _derive
from gateway.accounts.sessions import ACCOUNT
from gateway.api.sign_in import TICKET
from gateway.errors import AddressNotVerified, SignInFailed, SignInUnavailable
from gateway.keys import REGISTRATIONS_KEY, members_key
from gateway.outbound.client import Client
from gateway.redis.client import Store
from gateway.redis.scripts import CHANGES_CHANNEL
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.fakes.backend import private_key
from tests.fakes.identity import CLIENT_ID, CLIENT_SECRET, FakeIdentityProvider
from tests.fakes.jwks import LEFT_OUT
from tests.fakes.server import Head, Script, answer
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.responses import refused
from tests.support.stores import opened
from tests.support.visitor import Visitor

OPERATORS = "Root@example.com, groups=capsule-operators, teams=ops@example.com, email=boss@example.com"

pytestmark = pytest.mark.asyncio(loop_scope="session")


@module_fixture
async def shared_idp() -> AsyncIterator[FakeIdentityProvider]:
    async with FakeIdentityProvider() as idp:
        yield idp


@pytest.fixture
def idp(shared_idp: FakeIdentityProvider) -> FakeIdentityProvider:
    """A provider that does what it should, until the test asks otherwise."""
    shared_idp.behave()
    return shared_idp


@module_fixture
async def oidc(
    provider: FakeProvider, shared_idp: FakeIdentityProvider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("openid")
    operators = shared_idp.settings(OPERATORS=OPERATORS)
    fast = {"gateway.accounts.openid.FAILURE_SECONDS": 0.0}
    async with gateway_with_redis(provider, folder, fast, GATEWAY_REGISTRATIONS_PER_DAY="1000", **operators) as running:
        running.confidential.add(CLIENT_SECRET)
        yield running


@module_fixture
async def openid(oidc: Gateway, shared_idp: FakeIdentityProvider) -> AsyncIterator[OpenId]:
    """What the gateway signs people in with, in this process."""
    async with opened(oidc.redis.url) as store, make_openid(shared_idp.address, store) as openid:
        yield openid


@pytest_asyncio.fixture(loop_scope="session")
async def visitor(oidc: Gateway) -> AsyncIterator[Visitor]:
    visitor = Visitor(oidc)
    async with visitor.http:
        yield visitor


def new_email() -> str:
    return f"ada-{secrets.token_hex(4)}@example.com"


async def begin(visitor: Visitor, query: str = "") -> str:
    """Returns the address at the provider."""
    response = await visitor.call("GET", f"/dashboard/sign-in{query}")
    assert response.status_code == 302, response.text
    return response.headers["location"]


async def come_back(visitor: Visitor, answer: dict[str, str]) -> httpx.Response:
    visitor.gw.confidential |= {answer["code"]} if "code" in answer else set()
    response = await visitor.http.get("/dashboard/callback", params=answer, headers=visitor.headers)
    visitor.gw.confidential |= {response.cookies[ACCOUNT]} if ACCOUNT in response.cookies else set()
    return response


async def sign_in(visitor: Visitor, idp: FakeIdentityProvider, email: str, query: str = "", /, **claims: Any) -> Any:
    response = await come_back(visitor, idp.grant(await begin(visitor, query), email, **claims))
    assert response.status_code == 302, response.text
    return response


async def leave_one_attempt(visitor: Visitor) -> None:
    """Fails to log in as often as a network may in a minute, but for once. Sign-ins are counted with log-ins."""
    for _ in range(9):
        refused(await visitor.log_in("csk_wrong"), 401, "UNAUTHORIZED")


def assert_page(response: httpx.Response, status: int, text: str = "") -> None:
    """A refusal is a page that says what to do, and opens no session."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("text/html")
    assert "/dashboard/sign-in" in response.text
    assert text in response.text
    assert ACCOUNT not in response.cookies
    assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_the_first_sign_in_creates_an_account(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    email = new_email()
    location = await begin(visitor)
    asked = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
    assert location.startswith(f"{idp.address}/authorization?")
    assert (asked["response_type"], asked["client_id"], asked["code_challenge_method"]) == ("code", CLIENT_ID, "S256")
    assert asked["redirect_uri"] == f"{oidc.address}/dashboard/callback"
    response = await come_back(visitor, idp.grant(location, email.upper()))
    assert (response.status_code, response.headers["location"]) == (302, "/dashboard")
    assert "SameSite=strict" in response.headers["set-cookie"]
    form = idp.forms[-1]
    challenge = hashlib.sha256(form["code_verifier"][0].encode()).digest()
    assert base64.urlsafe_b64encode(challenge).rstrip(b"=").decode() == asked["code_challenge"]
    account = (await visitor.call("GET", "/account")).json()
    assert (account["name"], account["plan"]) == (email, "free")
    [member] = (await visitor.call("GET", "/account/members")).json()
    assert (member["email"], member["role"]) == (email, "owner")
    session = (await visitor.call("GET", "/dashboard/session")).json()
    assert (session["email"], session["account"], session["operator"]) == (email, account["id"], False)
    # The second time, it is the same account.
    visitor.http.cookies.clear()
    await sign_in(visitor, idp, email)
    assert (await visitor.call("GET", "/account")).json()["id"] == account["id"]


FAULTS: dict[str, dict[str, Any]] = {
    "another nonce": {"nonce": "another"},
    "no nonce": {"nonce": ...},
    "another audience": {"aud": "another"},
    "several audiences without azp": {"aud": [CLIENT_ID, "another"]},
    "another azp": {"azp": "another"},
    "another issuer": {"iss": "https://evil.example"},
    "expired": {"exp": int(time.time()) - 60},
    "no exp": {"exp": ...},
    "of the future": {"iat": int(time.time()) + 3600},
    "no subject": {"sub": ...},
    "a subject that is a number": {"sub": 7},
    "no audience": {"aud": ...},
    "no issuer": {"iss": ...},
    "no iat": {"iat": ...},
    "exp is a text": {"exp": str(int(time.time()) + 60)},
    "azp is a list": {"azp": [CLIENT_ID]},
    "no signature": {"alg": "none"},
    "signed with the client's secret": {"alg": "HS256", "key": CLIENT_SECRET.ljust(64, "0")},
    "signed by somebody else": {"key": private_key("ES256")},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_id_token_that_is_wrong(openid: OpenId, idp: FakeIdentityProvider, fault: str) -> None:
    with pytest.raises(SignInFailed):
        await complete(openid, idp, **FAULTS[fault])


async def test_what_is_no_id_token(openid: OpenId, idp: FakeIdentityProvider) -> None:
    for text in ("", "a.b.c", "\xe9.e30.e30", 5):
        idp.token_answer = {"id_token": text}
        with pytest.raises(SignInFailed):
            await complete(openid, idp)
    idp.faults = {"/token": [b"<html>"]}
    with pytest.raises(SignInFailed):
        await complete(openid, idp)


async def test_the_address_at_userinfo(openid: OpenId, idp: FakeIdentityProvider) -> None:
    """An address of the token without its verification does not borrow that of userinfo."""
    token, email = {"sub": "ada", "email": "victim@example.com", "email_verified": ...}, new_email()
    idp.userinfo = {"sub": "ada", "email": email, "email_verified": "true", "phone_number": None}
    assert (await complete(openid, idp, **token)).email == email
    for userinfo, refusal in (
        ({"sub": "bob", "email_verified": True}, SignInFailed),
        ({"sub": "ada"}, AddressNotVerified),
    ):
        idp.userinfo = {**userinfo, "email": email}
        with pytest.raises(refusal):
            await complete(openid, idp, **token)


# What differs in the browser's answer, and a word of the page.
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "another state": ({"state": "another"}, "another one"),
    "no state": ({"state": ...}, "another one"),
    "no code": ({"code": ...}, ""),
    "access was denied": ({"code": ..., "error": "access_denied"}, "canceled"),
    "another issuer": ({"iss": "https://evil.example"}, ""),
}


@pytest.mark.parametrize("fault", ANSWERS)
async def test_an_answer_that_is_wrong_uses_up_nothing(visitor: Visitor, idp: FakeIdentityProvider, fault: str) -> None:
    changes, text = ANSWERS[fault]
    answer = idp.grant(await begin(visitor), new_email())
    wrong = {name: value for name, value in {**answer, **changes}.items() if value is not ...}
    assert_page(await come_back(visitor, wrong), 400, text)
    assert (await come_back(visitor, {**answer, "iss": idp.address})).status_code == 302


async def test_only_the_browser_that_began_completes_a_sign_in(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    answer = idp.grant(await begin(visitor), new_email())
    ticket = visitor.http.cookies[TICKET]
    # In another browser, into which somebody lures a victim with their own answer.
    visitor.http.cookies.clear()
    assert_page(await come_back(visitor, answer), 400, "another browser")
    unsigned = f"{int(time.time()) - SIGN_IN_SECONDS - 1}.dashboard.{ticket.split('.')[2]}"
    openid = OpenId(Settings(oidc_client_secret=CLIENT_SECRET), cast(Store, None), cast(Client, None))
    expired = f"{unsigned}.{openid._sign(unsigned)}"
    visitor.http.cookies.set(TICKET, expired)
    assert_page(await come_back(visitor, {**answer, "state": _derive(expired, "state")}), 400, "expired")
    visitor.http.cookies.clear()
    visitor.http.cookies.set(TICKET, ticket)
    assert (await come_back(visitor, answer)).status_code == 302


async def test_only_own_tickets_reach_the_provider(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    """Whoever makes tickets could make the service call the provider as often as they like."""
    await leave_one_attempt(visitor)
    await begin(visitor)
    own, asked = visitor.http.cookies[TICKET], len(idp.forms)
    now, random = int(time.time()), secrets.token_urlsafe(32)
    unsigned, signature = f"{now}.dashboard.{random}", own.rpartition(".")[2]
    changed = own.replace(own.split(".")[0], str(int(own.split(".")[0]) - 1))
    for forged in (unsigned, f"{unsigned}.{signature}", f"{unsigned}.{random}", f"{unsigned}.", changed, f"{own}="):
        visitor.http.cookies.set(TICKET, forged)
        assert_page(await come_back(visitor, {"code": random, "state": _derive(forged, "state")}), 400, "expired")
    visitor.http.cookies.set(TICKET, own)
    assert_page(await come_back(visitor, {"code": random, "state": "of another site"}), 400)
    assert len(idp.forms) == asked
    assert_page(await come_back(visitor, {"code": random, "state": _derive(own, "state")}), 400)
    assert len(idp.forms) == asked + 1
    # What the provider refuses counts as a failed log-in.
    visitor.http.cookies.clear()
    assert_page(await come_back(visitor, idp.grant(await begin(visitor), new_email())), 429)


async def test_a_callback_counts_once(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    """Even if the provider accepts its code again, and for one of several requests at once."""
    answer = idp.grant(await begin(visitor), new_email())
    cookie = {"Cookie": f"{TICKET}={visitor.http.cookies[TICKET]}"}

    async def repeat() -> httpx.Response:
        headers = {**visitor.headers, **cookie}
        response = await oidc.http.get("/dashboard/callback", params=answer, headers=headers)
        oidc.confidential |= {response.cookies[ACCOUNT]} if ACCOUNT in response.cookies else set()
        return response

    answers = await asyncio.gather(*(repeat() for _ in range(5)))
    assert sorted(each.status_code for each in answers) == [302, 400, 400, 400, 400]
    assert_page(await repeat(), 400, "complete already")


async def test_two_first_sign_ins_at_once_create_one_account(oidc: Gateway, idp: FakeIdentityProvider) -> None:
    email = new_email()
    visitors = [Visitor(oidc) for _ in range(3)]
    answers = [idp.grant(await begin(each), email) for each in visitors]
    responses = await asyncio.gather(*map(come_back, visitors, answers))
    assert 302 in {each.status_code for each in responses} <= {302, 400}
    signed_in = next(each for each, response in zip(visitors, responses, strict=True) if response.status_code == 302)
    session = await signed_in.call("GET", "/dashboard/session")
    assert len(session.json()["accounts"]) == 1
    for each in visitors:
        await each.http.aclose()


async def test_an_issuer_that_is_announced_must_be_there() -> None:
    async with FakeIdentityProvider() as idp, make_openid(idp.address) as openid:
        idp.metadata["authorization_response_iss_parameter_supported"] = True
        ticket, location = await openid.begin("dashboard")
        for answer in ({}, {"iss": "https://evil.example"}):
            with pytest.raises(SignInFailed):
                await openid.complete(ticket, {**idp.grant(location, new_email()), **answer})
        answer = {**idp.grant(location, new_email()), "iss": idp.address, "error": "access_denied"}
        with pytest.raises(SignInFailed, match="canceled"):
            await openid.complete(ticket, answer)


@contextlib.asynccontextmanager
async def make_openid(issuer: str, store: Store | None = None, *, trusting: bool = False) -> AsyncIterator[OpenId]:
    """Makes one in this process. Without a store, it must refuse or fail before it needs Redis."""
    settings = Settings(
        oidc_issuer=issuer, oidc_client_id=CLIENT_ID, oidc_client_secret=CLIENT_SECRET, oidc_trust_email=trusting
    )
    async with Client(allow_private=True, own=True) as http:
        yield OpenId(settings, cast(Store, store), http)


async def complete(openid: OpenId, idp: FakeIdentityProvider, email: str = "", /, **claims: Any) -> Identity:
    ticket, location = await openid.begin("dashboard")
    return await openid.complete(ticket, idp.grant(location, email or new_email(), **claims))


@pytest.mark.parametrize("page", ["//evil.example", "dashboard.evil", ""])
async def test_no_open_redirect(visitor: Visitor, page: str) -> None:
    response = await visitor.http.get("/dashboard/sign-in", params={"page": page}, headers=visitor.headers)
    refused(response, 400, "REQUEST_MALFORMED")
    await begin(visitor)
    visitor.http.cookies.set(TICKET, visitor.http.cookies[TICKET].replace("dashboard", page or "x"))
    assert_page(await come_back(visitor, {"state": "x"}), 400)


async def test_new_keys_of_the_provider(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    await begin(visitor)
    idp.key, idp.kid = private_key("ES256"), "two"
    await sign_in(visitor, idp, new_email())


async def test_what_is_null_is_absent(openid: OpenId, idp: FakeIdentityProvider) -> None:
    email = new_email()
    idp.userinfo = {"sub": email, "email": email, "email_verified": True, "groups": ["staff"]}
    absent = dict.fromkeys(["nbf", "jti", "azp", "email_verified", "groups"])
    assert (await complete(openid, idp, email, **absent)).claims["groups"] == ["staff"]
    idp.token_answer = dict.fromkeys(["access_token", "refresh_token", "expires_in"])
    nulls = "userinfo_endpoint token_endpoint_auth_methods_supported authorization_response_iss_parameter_supported"
    idp.metadata = dict.fromkeys([*nulls.split(), "end_session_endpoint"])
    idp.key = private_key("ES256")  # so that the metadata are read again
    assert (await complete(openid, idp, email)).email == email
    with pytest.raises(AddressNotVerified):  # without userinfo, the address is that of the token
        await complete(openid, idp, email, email_verified=...)


@pytest.mark.parametrize("keys", [[*LEFT_OUT.values()], None], ids=["keys that are left out", "null"])
async def test_a_provider_without_a_usable_key(keys: Any) -> None:
    async with FakeIdentityProvider() as idp, make_openid(idp.address) as openid:
        idp.jwks = {"keys": keys}
        with pytest.raises(SignInUnavailable):
            await openid.begin("dashboard")


# The address of a person, by default a new one, and further claims.
PEOPLE: dict[str, tuple[str, dict[str, Any], int]] = {
    "a group with a similar name": ("", {"groups": "capsule"}, 401),
    "one of the groups": ("", {"groups": ["staff", "capsule-operators"]}, 200),
    "an address": ("root@EXAMPLE.com", {}, 200),
    "an address as a claim": ("boss@example.com", {}, 200),
    "an address that reads like a claim": ("teams=ops@example.com", {}, 401),
}


@pytest.mark.parametrize("case", PEOPLE)
async def test_who_is_an_operator(visitor: Visitor, idp: FakeIdentityProvider, case: str) -> None:
    email, claims, status = PEOPLE[case]
    email = email or new_email()
    for query in ("", "?page=ops"):
        await sign_in(visitor, idp, email, query, **claims)
        assert (await visitor.call("GET", "/platform/audit")).status_code == status, query


async def test_an_operator_signs_in_and_out(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    response = await sign_in(visitor, idp, "root@EXAMPLE.com", "?page=ops")
    assert response.headers["location"] == "/ops"
    body = {"name": "By an operator", "plan": "free"}
    refused(await visitor.call("POST", "/platform/accounts", body, Origin="https://evil.example"), 403, "CSRF_REFUSED")
    made = (await visitor.call("POST", "/platform/accounts", body)).json()
    oidc.confidential.add(made["apiKey"])
    [record] = (await visitor.call("GET", "/platform/audit?limit=1")).json()
    found = (record["operator"], record["action"], record["target"])
    assert found == ("root@example.com", "create_account", made["id"])
    assert (await visitor.call("DELETE", "/ops/session")).status_code == 204
    refused(await visitor.call("GET", "/platform/audit"), 401, "UNAUTHORIZED")


async def test_closed_registrations(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    """Whoever belongs to an account signs in, and so do operators, as often as they like."""
    known, stranger = new_email(), new_email()
    await sign_in(visitor, idp, known)
    today = f"{REGISTRATIONS_KEY}:{time.strftime('%Y-%m-%d', time.gmtime())}"
    with oidc.redis.client() as client:
        before = client.get(today)
        client.set(today, 1000, keepttl=True)
    try:
        await sign_in(visitor, idp, known)
        visitor.http.cookies.clear()
        for _ in range(2):
            response = await come_back(visitor, idp.grant(await begin(visitor), stranger))
            assert_page(response, 429)
            assert int(response.headers["retry-after"]) > 0
        for _ in range(2):
            await sign_in(visitor, idp, stranger, "?page=ops", groups="capsule-operators")
            session = (await visitor.call("GET", "/dashboard/session")).json()
            assert (session["operator"], session["account"], session["accounts"]) == (True, None, [])
        assert refused(await visitor.call("GET", "/account"), 409, "ACCOUNT_NOT_CHOSEN")["accounts"] == []
        # So does whoever is invited.
        account, visitor_email = await oidc.account(), new_email()
        await account.call("PUT", f"/account/members/{visitor_email}", {"role": "viewer"})
        await sign_in(visitor, idp, visitor_email)
        session = (await visitor.call("GET", "/dashboard/session")).json()
        assert (session["account"], session["accounts"]) == (None, [])
        assert [each["account"] for each in session["invitations"]] == [account.id]
        assert (await visitor.call("PUT", f"/dashboard/session/invitations/{account.id}")).status_code == 200
        assert (await visitor.call("GET", "/account")).json()["id"] == account.id
    finally:
        with oidc.redis.client() as client:
            client.set(today, before, keepttl=True)


async def test_an_invitation_takes_nobodys_own_account(
    oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider
) -> None:
    """A stranger invites an address before its first sign-in, as an owner of an account that has its name."""
    email, stranger = new_email(), await oidc.account()
    assert (await stranger.call("PATCH", "/account", {"name": email})).status_code == 200
    invited = await stranger.call("PUT", f"/account/members/{email}", {"role": "owner"})
    assert (invited.status_code, invited.json()["state"]) == (200, "invited")
    for _ in range(2):
        visitor.http.cookies.clear()
        await sign_in(visitor, idp, email)
        session = (await visitor.call("GET", "/dashboard/session")).json()
        [own] = session["accounts"]
        assert own["id"] == session["account"] != stranger.id
        assert (own["name"], own["owner"]) == (email, email)
        [invitation] = session["invitations"]
        assert (invitation["account"], invitation["name"], invitation["by"]) == (stranger.id, email, "API key")
    assert (await visitor.call("DELETE", f"/dashboard/session/invitations/{stranger.id}")).status_code == 204
    assert (await stranger.get("/account/members")).json() == []


async def test_no_account_ends_the_session_of_an_operator(
    oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider
) -> None:
    """Neither an account that the operator never belonged to, nor one of several, nor the one that is chosen."""
    email, stranger = new_email(), await oidc.account()
    accounts = [await oidc.account() for _ in range(2)]
    for account in accounts:
        await visitor.join(account, email, "developer")
    await sign_in(visitor, idp, email, "?page=ops", groups="capsule-operators")
    for account in (stranger, accounts[0]):
        assert (await visitor.call("GET", "/platform/accounts")).status_code == 200
        status = 404 if account is stranger else 204
        assert (await account.call("DELETE", f"/account/members/{email}")).status_code == status
    assert (await visitor.call("GET", "/platform/accounts")).status_code == 200
    chosen = accounts[1]
    assert (await visitor.call("PUT", "/dashboard/session", {"account": chosen.id})).status_code == 204
    assert (await visitor.call("GET", "/account")).json()["id"] == chosen.id
    assert (await chosen.call("DELETE", f"/account/members/{email}")).status_code == 204
    assert (await visitor.call("GET", "/platform/accounts")).status_code == 200
    assert refused(await visitor.call("GET", "/account"), 409, "ACCOUNT_NOT_CHOSEN")["accounts"] == []
    session = (await visitor.call("GET", "/dashboard/session")).json()
    assert (session["account"], session["operator"], session["permitted"]) == (None, True, [])


async def test_half_of_a_day_is_kept_for_people_who_sign_in(
    provider: FakeProvider, idp: FakeIdentityProvider, tmp_path: Path
) -> None:
    async with gateway_with_redis(provider, tmp_path, GATEWAY_REGISTRATIONS_PER_DAY="7", **idp.settings()) as gw:
        gw.confidential.add(CLIENT_SECRET)
        statuses = []
        for n in range(6):
            headers = {"X-Forwarded-For": f"93.184.216.{n}"}
            answer = await gw.http.post("/register", json={"name": "Stranger"}, headers=headers)
            gw.confidential |= {answer.json()["apiKey"]} if answer.status_code == 201 else set()
            statuses.append(answer.status_code)
        assert statuses == [201] * 3 + [429] * 3
        assert "sign in" in refused(answer, 429, "REGISTRATIONS_CLOSED")["message"]
        page = (await gw.http.get("/")).text
        assert 'id="register" class="card" hidden' in page
        assert 'people who <a href="/dashboard">sign in</a>' in page
        for n in range(5):
            visitor = Visitor(gw)
            async with visitor.http:
                response = await come_back(visitor, idp.grant(await begin(visitor), new_email()))
                assert response.status_code == (302 if n < 4 else 429)


async def test_a_stranger_uses_up_nothing_of_people_on_the_same_network(
    oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider
) -> None:
    visitor.headers["X-Forwarded-For"] = "93.184.216.99"
    while (answer := await visitor.call("POST", "/register", {"name": "Stranger"})).status_code == 201:
        oidc.confidential.add(answer.json()["apiKey"])
    refused(answer, 429, "REGISTRATIONS_CLOSED")
    await sign_in(visitor, idp, new_email())


async def test_without_a_provider_nothing_changes(gw: Gateway) -> None:
    for path in ("/dashboard/sign-in", "/dashboard/callback"):
        response = await gw.http.get(path)
        assert (response.status_code, response.content) == (404, (await gw.http.get("/nothing")).content)


async def test_a_provider_that_is_away_or_another_one() -> None:
    async with FakeIdentityProvider() as idp:
        for issuer in ("http://127.0.0.1:9", f"{idp.address}/"):
            async with make_openid(issuer) as openid:
                for _ in range(2):
                    with pytest.raises(SignInUnavailable):
                        await openid.begin("dashboard")


# -- what providers send -------------------------------------------------------------------------------------


VERIFIED: dict[str, dict[str, Any]] = {
    "Entra ID, version 1": {"email_verified": ..., "xms_edov": "1"},
    "Entra ID, a number": {"email_verified": ..., "xms_edov": 1},
    "Entra ID, a text": {"email_verified": None, "xms_edov": "true"},
}


async def test_forms_of_a_verification(openid: OpenId, idp: FakeIdentityProvider) -> None:
    for form, claims in VERIFIED.items():
        email = new_email()
        assert (await complete(openid, idp, email, **claims)).email == email, form


# What the ID token and userinfo say, and the reason in the log.
REASONS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "none": ({"email": ..., "email_verified": ...}, {}, "no-email"),
    "null": ({"email": None}, {"email": None, "email_verified": True}, "no-email"),
    "no userinfo": ({"email_verified": ...}, None, "no-userinfo"),
    "empty": ({"email": ""}, {}, "email-malformed"),
    "a slash": ({"email": "a/b@example.com"}, {}, "email-malformed"),
    "a number": ({"email": 7}, {}, "email-malformed"),
    "a Kelvin sign, whose lower case is k": ({"email": "ada@exam\u212ale.com"}, {}, "email-not-ascii"),
    "not said": ({"email_verified": ...}, {"email": "ada@example.com"}, "no-verification"),
    "said of another one": ({"email_verified": ...}, {"email_verified": True}, "no-verification"),
    "false": ({"email_verified": False}, {}, "not-verified"),
    "another text": ({"email_verified": "True"}, {}, "not-verified"),
    "1": ({"email_verified": 1}, {}, "not-verified"),
    "false in place of Entra ID's": ({"email_verified": False, "xms_edov": True}, {}, "not-verified"),
    "false at userinfo": (
        {"email_verified": ...},
        {"email": "ada@example.com", "email_verified": "false"},
        "not-verified",
    ),
    "false without an address": ({"email": ..., "email_verified": False}, {"email": "ada@example.com"}, "not-verified"),
    "false of Entra ID": ({"email_verified": ..., "xms_edov": "0"}, {}, "not-verified"),
}


@pytest.mark.parametrize("case", REASONS)
async def test_the_log_says_what_is_wrong_with_an_address(openid: OpenId, idp: FakeIdentityProvider, case: str) -> None:
    claims, userinfo, reason = REASONS[case]
    # The person can do something about it only in one case.
    advice = "verify your address there" if reason == "not-verified" else "tell the operator"
    with capture_logs() as log, pytest.raises(AddressNotVerified, match=advice):
        await complete_with(openid, idp, claims, userinfo)
    assert [(line["reason"], line["detail"]) for line in log] == [(reason, None)]


async def complete_with(
    openid: OpenId, idp: FakeIdentityProvider, claims: dict[str, Any], userinfo: dict[str, Any] | None
) -> Identity:
    email = new_email()
    idp.userinfo = {"sub": email, **(userinfo or {})}
    idp.token_answer = {"access_token": None} if userinfo is None else {}
    return await complete(openid, idp, email, **claims)


def refusals(gw: Gateway) -> list[tuple[str, str | None]]:
    """Returns the reasons and details of all refused sign-ins in the log."""
    lines = (json.loads(line) for line in gw.log.splitlines() if '"openid.refused"' in line)
    return [(line["reason"], line["detail"]) for line in lines]


async def test_the_log_says_what_else_is_wrong(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    before = len(refusals(oidc))
    errors = ({"error": "access_denied"}, {"error": "invalid_scope"}, {"error": "<b>" * 99})
    for changes in (*errors, {"code": secrets.token_hex(16)}):
        visitor.http.cookies.clear()
        assert_page(await come_back(visitor, idp.grant(await begin(visitor), new_email()) | changes), 400)
    assert_page(await come_back(visitor, idp.grant(await begin(visitor), new_email(), nonce="another")), 400)
    expected = [("denied", None), ("error", "invalid_scope"), ("error", None), ("code", "invalid_grant")]
    await wait_until(lambda: len(refusals(oidc)) == before + 5)
    assert refusals(oidc)[before:] == [*expected, ("token", "nonce")]


async def test_addresses_that_the_operator_trusts(oidc: Gateway, idp: FakeIdentityProvider) -> None:
    async with opened(oidc.redis.url) as store, make_openid(idp.address, store, trusting=True) as openid:
        for claims, userinfo, reason in REASONS.values():
            if reason in ("no-verification", "no-userinfo"):
                assert (await complete_with(openid, idp, claims, userinfo)).email.endswith("@example.com"), claims
            else:
                with pytest.raises(AddressNotVerified):
                    await complete_with(openid, idp, claims, userinfo)


# What differs in a signed userinfo, whether it is accepted, and the algorithm and key of another signer.
SIGNED_USERINFO: dict[str, tuple[Any, ...]] = {
    "as OpenID Connect says": ({}, True),
    "without what is optional": ({"iss": ..., "aud": ...}, True),
    "of another issuer": ({"iss": "https://evil.example"}, False),
    "for another client": ({"aud": "another"}, False),
    "of somebody else": ({"sub": "somebody else"}, False),
    "signed by somebody else": ({}, False, "ES256", private_key("ES256")),
    "not signed": ({}, False, "none", None),
}


@pytest.mark.parametrize("case", SIGNED_USERINFO)
async def test_userinfo_that_is_signed(openid: OpenId, idp: FakeIdentityProvider, case: str) -> None:
    (changes, accepted, *signer), email = SIGNED_USERINFO[case], new_email()
    alg, key = signer or ("ES256", idp.key)
    claims = {"iss": idp.address, "aud": CLIENT_ID, "sub": email, "email": email, "email_verified": True, **changes}
    kept = {name: value for name, value in claims.items() if value is not ...}
    text = jwt.encode(kept, key, algorithm=alg, headers={"kid": idp.kid})
    idp.faults["/userinfo"] = [Head(200, {"Content-Type": "application/jwt; charset=utf-8"}), text.encode()]
    with contextlib.nullcontext() if accepted else pytest.raises(SignInFailed):
        assert (await complete(openid, idp, email, email=..., email_verified=...)).email == email


PROVIDER_FAULTS: dict[str, tuple[str, Script]] = {
    "503": ("/token", [Head(503, {"Content-Length": "0"})]),
    "a wrong secret": ("/token", answer(401, {"error": "invalid_client"})),
    "a wrong secret at Cognito": ("/token", answer(400, {"error": "invalid_client"})),
    "userinfo refuses its own access token": ("/userinfo", answer(403, {"error": "insufficient_scope"})),
}


@pytest.mark.parametrize("failure", PROVIDER_FAULTS)
async def test_the_person_pays_for_no_fault_of_the_provider(
    visitor: Visitor, idp: FakeIdentityProvider, failure: str
) -> None:
    path, script = PROVIDER_FAULTS[failure]
    await leave_one_attempt(visitor)
    brought = idp.grant(await begin(visitor), new_email(), email_verified=...)
    idp.faults = {path: script}
    assert_page(await come_back(visitor, brought), 503)
    idp.faults = {}
    await sign_in(visitor, idp, new_email())


async def test_the_provider_comes_back_with_a_failure(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    await leave_one_attempt(visitor)
    for error in ("server_error", "temporarily_unavailable"):
        state = idp.grant(await begin(visitor), new_email())["state"]
        assert_page(await come_back(visitor, {"state": state, "error": error}), 503)
    assert prompt(await begin(visitor)) is None
    await sign_in(visitor, idp, new_email())


# -- another account -----------------------------------------------------------------------------------------


def prompt(location: str) -> str | None:
    return parse_qs(urlsplit(location).query).get("prompt", [None])[0]


async def test_who_logged_out_may_select_an_account(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    assert prompt(await begin(visitor)) is None
    for path in ("/dashboard/session", "/ops/session", "/dashboard/session?everywhere=true"):
        await sign_in(visitor, idp, new_email())
        assert prompt(await begin(visitor)) is None
        assert (await visitor.call("DELETE", path)).status_code == 204
        location = await begin(visitor, "?page=ops")
        assert prompt(location) == "select_account"
        # Only once: a provider without it must not keep anybody out.
        assert prompt(await begin(visitor)) is None
    assert (await come_back(visitor, idp.grant(await begin(visitor), new_email()))).status_code == 302


async def test_who_is_refused_may_select_an_account(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    assert_page(await come_back(visitor, idp.grant(await begin(visitor), "x", email_verified=False)), 403)
    location = await begin(visitor)
    assert prompt(location) == "select_account"
    response = await come_back(visitor, idp.grant(location, new_email()))
    assert (response.status_code, response.headers["location"]) == (302, "/dashboard")
    denied = {"state": idp.grant(await begin(visitor), "x")["state"], "error": "access_denied"}
    assert_page(await come_back(visitor, denied), 400)
    assert prompt(await begin(visitor)) == "select_account"


async def test_a_provider_that_refuses_the_prompt(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    error = "account_selection_required"
    await sign_in(visitor, idp, new_email())
    assert (await visitor.call("DELETE", "/dashboard/session")).status_code == 204
    state = idp.grant(await begin(visitor, "?page=ops"), "x")["state"]
    response = await come_back(visitor, {"state": state, "error": error})
    assert (response.status_code, response.headers["location"]) == (302, "/dashboard/sign-in?page=ops")
    location = await begin(visitor, "?page=ops")
    assert prompt(location) is None
    # It is refused without the prompt too: this is no reason to try again.
    assert_page(await come_back(visitor, {"state": idp.grant(location, "x")["state"], "error": error}), 400)


@pytest.mark.parametrize(
    ("announced", "sent"),
    [
        (None, "select_account"),
        (["none", "login", "consent"], "login"),
        (["none", "consent"], None),
    ],
)
async def test_a_provider_that_announces_its_prompts(announced: list[str] | None, sent: str | None) -> None:
    async with FakeIdentityProvider() as idp, make_openid(idp.address) as openid:
        idp.metadata["prompt_values_supported"] = announced
        _, location = await openid.begin("dashboard", select_account=True)
        assert prompt(location) == sent


# -- operators -----------------------------------------------------------------------------------------------


async def test_a_removal_does_not_end_the_session_of_an_operator_halfway(
    oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider
) -> None:
    """First the membership ends, and only then does the session go on without the account."""
    email, account = new_email(), await oidc.account()
    await visitor.join(account, email, "developer")
    await sign_in(visitor, idp, email, "?page=ops", groups="capsule-operators")
    assert (await visitor.call("GET", "/account")).json()["id"] == account.id
    with oidc.redis.client() as client:
        record = json.loads(client.get(members_key(account.id)))
        del record["members"][email]
        client.set(members_key(account.id), json.dumps(record))
        client.publish(CHANGES_CHANNEL, members_key(account.id))

    async def status() -> int:
        return (await visitor.call("GET", "/account")).status_code

    assert await wait_until(status, holds=lambda seen: seen != 200) == 409
    assert (await visitor.call("GET", "/platform/accounts")).status_code == 200
