"""Sign-in with OpenID Connect: the flow, and what a provider, a browser or a third party may try."""

import asyncio
import base64
import contextlib
import hashlib
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
from gateway.accounts.operators import Operators
from gateway.accounts.sessions import ACCOUNT
from gateway.api.sign_in import TICKET
from gateway.errors import AddressNotVerified, SignInFailed, SignInUnavailable
from gateway.keys import REGISTRATIONS_KEY
from gateway.outbound.client import Client
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.fakes import FakeProvider
from tests.fakes.backend import private_key
from tests.fakes.identity import CLIENT_ID, CLIENT_SECRET, FakeIdentityProvider
from tests.fakes.jwks import LEFT_OUT
from tests.fakes.server import Head, Script, answer
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway_with_redis
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


async def read_session(visitor: Visitor) -> dict[str, Any]:
    session: dict[str, Any] = (await visitor.call("GET", "/dashboard/session")).json()
    return session


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
    session = await read_session(visitor)
    assert (session["email"], session["account"], session["operator"]) == (email, account["id"], False)
    # The second time, it is the same account.
    visitor.http.cookies.clear()
    await sign_in(visitor, idp, email)
    assert (await visitor.call("GET", "/account")).json()["id"] == account["id"]


TOKENS: list[dict[str, Any]] = [
    *({"nonce": nonce} for nonce in ("another", ...)),
    *({"aud": audience} for audience in ("another", [CLIENT_ID, "another"])),  # the second without azp
    *({"azp": azp} for azp in ("another", [CLIENT_ID])),
    {"iss": "https://evil.example"},
    *({"exp": exp} for exp in (int(time.time()) - 60, str(int(time.time()) + 60))),
    *({"sub": subject} for subject in (..., "", 7)),
    {"iat": ...},
    {"alg": "none"},
    {"alg": "HS256", "key": CLIENT_SECRET.ljust(64, "0")},
    {"key": private_key("ES256")},
]


async def test_an_id_token_that_is_wrong(openid: OpenId, idp: FakeIdentityProvider) -> None:
    for claims in TOKENS:
        with pytest.raises(SignInFailed):
            await complete(openid, idp, **claims)
    for text in ("", "a.b.c", "\xe9.e30.e30", 5):
        idp.token_answer = {"id_token": text}
        with pytest.raises(SignInFailed):
            await complete(openid, idp)
    idp.faults = {"/token": [b"<html>"]}
    with pytest.raises(SignInFailed):
        await complete(openid, idp)


# What differs in a userinfo, whether it is accepted, and the algorithm and key of another signer.
USERINFO: list[tuple[Any, ...]] = [
    ({}, True),
    ({"iss": ..., "aud": ...}, True),
    ({"iss": "https://evil.example"}, False),
    ({"aud": "another"}, False),
    ({"sub": "somebody else"}, False),
    ({}, False, "ES256", private_key("ES256")),
    ({}, False, "none", None),
]


async def test_userinfo(openid: OpenId, idp: FakeIdentityProvider) -> None:
    """A userinfo that is signed, and one of somebody else that is not. It lends no verification to another address."""
    for changes, accepted, *signer in USERINFO:
        email, (alg, key) = new_email(), signer or ("ES256", idp.key)
        claims = {"iss": idp.address, "aud": CLIENT_ID, "sub": email, "email": email, "email_verified": True, **changes}
        kept = {name: value for name, value in claims.items() if value is not ...}
        text = jwt.encode(kept, key, algorithm=alg, headers={"kid": idp.kid})
        idp.faults["/userinfo"] = [Head(200, {"Content-Type": "application/jwt; charset=utf-8"}), text.encode()]
        with contextlib.nullcontext() if accepted else pytest.raises(SignInFailed):
            found = await complete(openid, idp, email, email="victim@example.com", email_verified=...)
            assert found.email == email
    idp.faults = {}
    idp.userinfo = {"sub": "bob", "email": new_email(), "email_verified": True}
    with pytest.raises(SignInFailed):
        await complete(openid, idp, sub="ada", email_verified=...)


async def test_what_is_null_is_absent(openid: OpenId, idp: FakeIdentityProvider) -> None:
    email = new_email()
    idp.userinfo = {"sub": email, "email": email, "email_verified": True, "groups": ["staff"]}
    absent = dict.fromkeys(["nbf", "jti", "azp", "email_verified", "groups"])
    assert (await complete(openid, idp, email, **absent)).claims["groups"] == ["staff"]
    idp.token_answer = dict.fromkeys(["access_token", "refresh_token", "expires_in"])
    nulls = ["userinfo_endpoint", "token_endpoint_auth_methods_supported", "end_session_endpoint"]
    idp.metadata = dict.fromkeys([*nulls, "authorization_response_iss_parameter_supported"])
    idp.key, idp.kid = private_key("ES256"), "two"  # so that keys and metadata are read again
    assert (await complete(openid, idp, email)).email == email
    with pytest.raises(AddressNotVerified):  # without userinfo, the address is that of the token
        await complete(openid, idp, email, email_verified=...)


async def test_an_answer_that_is_wrong_uses_up_nothing(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    answer = idp.grant(await begin(visitor), new_email())
    for changes, text in (
        ({"state": "another"}, "another one"),
        ({"state": ...}, "another one"),
        ({"code": ...}, ""),
        ({"code": ..., "error": "access_denied"}, "canceled"),
        ({"iss": "https://evil.example"}, ""),
    ):
        wrong = {name: value for name, value in {**answer, **changes}.items() if value is not ...}
        assert_page(await come_back(visitor, wrong), 400, text)
    assert (await come_back(visitor, {**answer, "iss": idp.address})).status_code == 302


async def test_only_the_browser_that_began_completes_a_sign_in(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    """Whoever makes tickets could make the service call the provider as often as they like, or redirect elsewhere."""
    await leave_one_attempt(visitor)
    answer, asked = idp.grant(await begin(visitor), new_email()), len(idp.forms)
    own = visitor.http.cookies[TICKET]
    # In another browser, into which somebody lures a victim with their own answer.
    visitor.http.cookies.clear()
    assert_page(await come_back(visitor, answer), 400, "another browser")
    began, page, random, signature = own.split(".")
    openid = OpenId(Settings(oidc_client_secret=CLIENT_SECRET), cast(Store, None), cast(Client, None))
    expired = f"{int(began) - SIGN_IN_SECONDS - 1}.{page}.{random}"
    unsigned = f"{began}.{page}.{secrets.token_urlsafe(32)}"
    for forged in (
        *(f"{expired}.{openid._sign(expired)}", f"{int(began) - 1}.{page}.{random}.{signature}", f"{own}="),
        *(unsigned, f"{unsigned}.{signature}", f"{unsigned}.{random}", f"{unsigned}."),
        own.replace("dashboard", "//evil.example"),
    ):
        visitor.http.cookies.set(TICKET, forged)
        assert_page(await come_back(visitor, {**answer, "state": _derive(forged, "state")}), 400, "expired")
    visitor.http.cookies.set(TICKET, own)
    assert_page(await come_back(visitor, {"code": random, "state": "of another site"}), 400)
    assert len(idp.forms) == asked
    assert_page(await come_back(visitor, {**answer, "code": random}), 400)
    assert len(idp.forms) == asked + 1
    # What the provider refuses counts as a failed log-in.
    visitor.http.cookies.clear()
    assert_page(await come_back(visitor, idp.grant(await begin(visitor), new_email())), 429)
    for page in ("//evil.example", "dashboard.evil", ""):
        response = await visitor.http.get("/dashboard/sign-in", params={"page": page}, headers=visitor.headers)
        refused(response, 400, "REQUEST_MALFORMED")


async def test_a_callback_counts_once(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    """Even if the provider accepts its code again, and for one of several requests at once."""
    answer = idp.grant(await begin(visitor), new_email())
    cookie = {"Cookie": f"{TICKET}={visitor.http.cookies[TICKET]}"}

    async def repeat() -> httpx.Response:
        response = await oidc.http.get("/dashboard/callback", params=answer, headers={**visitor.headers, **cookie})
        oidc.confidential |= {response.cookies[ACCOUNT]} if ACCOUNT in response.cookies else set()
        return response

    answers = await asyncio.gather(*(repeat() for _ in range(3)))
    assert sorted(each.status_code for each in answers) == [302, 400, 400]
    assert_page(await repeat(), 400, "complete already")


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


@pytest.mark.parametrize(
    ("entry", "claims"),
    [("admin=true", {"admin": True}), ("level=3", {"level": 3}), ("level=3", {"level": [1, 3]}), ("a=b", {"a": "b"})],
)
async def test_a_claim_that_is_no_text_is_compared_as_it_is_written(entry: str, claims: dict[str, Any]) -> None:
    operators = Operators(Settings(oidc_operators=(entry,)))
    assert operators.match("ana@example.com", claims) == entry
    for other in ({}, {"admin": False}, {"admin": "True"}, {"level": "30"}, {"a": ["bc"]}):
        assert operators.match("ana@example.com", other) == ""
    assert Operators(Settings(oidc_operators=("admin=null",))).match("ana@example.com", {}) == ""


async def test_who_is_an_operator(oidc: Gateway, visitor: Visitor, idp: FakeIdentityProvider) -> None:
    for email, groups, operator in (
        (new_email(), "capsule", None),  # a similar name
        (new_email(), ["staff", "capsule-operators"], "groups=capsule-operators"),
        ("boss@example.com", ..., "email=boss@example.com"),
        ("teams=ops@example.com", ..., None),  # an address that reads like a claim
        ("root@EXAMPLE.com", ..., "root@example.com"),
    ):
        response = await sign_in(visitor, idp, email, "?page=ops", groups=groups)
        assert response.headers["location"] == "/ops"
        assert (await visitor.call("GET", "/platform/audit")).status_code == (200 if operator else 401), email
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
        response = await come_back(visitor, idp.grant(await begin(visitor), stranger))
        assert_page(response, 429)
        assert int(response.headers["retry-after"]) > 0
        for _ in range(2):
            await sign_in(visitor, idp, stranger, "?page=ops", groups="capsule-operators")
            session = await read_session(visitor)
            assert (session["operator"], session["account"], session["accounts"]) == (True, None, [])
        assert refused(await visitor.call("GET", "/account"), 409, "ACCOUNT_NOT_CHOSEN")["accounts"] == []
        # So does whoever is invited.
        account, visitor_email = await oidc.account(), new_email()
        await account.call("PUT", f"/account/members/{visitor_email}", {"role": "viewer"})
        await sign_in(visitor, idp, visitor_email)
        session = await read_session(visitor)
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
        session = await read_session(visitor)
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
    session = await read_session(visitor)
    assert (session["account"], session["operator"], session["permitted"]) == (None, True, [])


async def test_half_of_a_day_is_kept_for_people_who_sign_in(
    provider: FakeProvider, idp: FakeIdentityProvider, tmp_path: Path
) -> None:
    async with gateway_with_redis(provider, tmp_path, GATEWAY_REGISTRATIONS_PER_DAY="7", **idp.settings()) as gw:
        gw.confidential.add(CLIENT_SECRET)
        for n in range(4):
            headers = {"X-Forwarded-For": f"93.184.216.{n}"}
            answer = await gw.http.post("/register", json={"name": "Stranger"}, headers=headers)
            assert answer.status_code == (201 if n < 3 else 429)
            gw.confidential |= {answer.json()["apiKey"]} if n < 3 else set()
        assert "sign in" in refused(answer, 429, "REGISTRATIONS_CLOSED")["message"]
        page = (await gw.http.get("/")).text
        assert 'id="register" class="card" hidden' in page
        assert 'people who <a href="/dashboard">sign in</a>' in page
        for n in range(5):
            visitor = Visitor(gw)
            async with visitor.http:
                response = await come_back(visitor, idp.grant(await begin(visitor), new_email()))
                assert response.status_code == (302 if n < 4 else 429)


async def test_without_a_provider_nothing_changes(gw: Gateway) -> None:
    for path in ("/dashboard/sign-in", "/dashboard/callback"):
        response = await gw.http.get(path)
        assert (response.status_code, response.content) == (404, (await gw.http.get("/nothing")).content)


async def test_a_provider_that_is_away_or_another_one(idp: FakeIdentityProvider) -> None:
    for issuer in ("http://127.0.0.1:9", f"{idp.address}/"):
        async with make_openid(issuer) as openid:
            for _ in range(2):
                with pytest.raises(SignInUnavailable):
                    await openid.begin("dashboard")
    for keys in ([*LEFT_OUT.values()], None):
        idp.jwks = {"keys": keys}
        async with make_openid(idp.address) as openid:
            with pytest.raises(SignInUnavailable):
                await openid.begin("dashboard")


async def test_what_a_provider_announces(idp: FakeIdentityProvider) -> None:
    """An issuer in the browser's answer must be there, and of its prompts, the first that we know is used."""
    for announced, sent in (
        (None, "select_account"),
        (["none", "login", "consent"], "login"),
        (["none", "consent"], None),
    ):
        idp.metadata["prompt_values_supported"] = announced
        async with make_openid(idp.address) as openid:
            assert prompt((await openid.begin("dashboard", select_account=True))[1]) == sent
    idp.metadata["authorization_response_iss_parameter_supported"] = True
    async with make_openid(idp.address) as openid:
        ticket, location = await openid.begin("dashboard")
        for answer in ({}, {"iss": "https://evil.example"}):
            with pytest.raises(SignInFailed):
                await openid.complete(ticket, {**idp.grant(location, new_email()), **answer})
        answer = {**idp.grant(location, new_email()), "iss": idp.address, "error": "access_denied"}
        with pytest.raises(SignInFailed, match="canceled"):
            await openid.complete(ticket, answer)


# -- what providers send -------------------------------------------------------------------------------------


# What the ID token and userinfo say of an address, and why it is refused.
UNKNOWN = {"email_verified": ...}
ADDRESSES: list[tuple[dict[str, Any], dict[str, Any] | None, str | None]] = [
    *((UNKNOWN | {"xms_edov": text}, {}, None) for text in ("1", 1, "true")),  # of Entra ID
    (UNKNOWN, {"email": "ada@example.com", "email_verified": "true", "phone_number": None}, None),
    (UNKNOWN | {"email": ...}, {}, "no-email"),
    ({"email": None}, {"email": None, "email_verified": True}, "no-email"),
    (UNKNOWN, None, "no-userinfo"),
    ({"email": ""}, {}, "email-malformed"),
    ({"email": "a/b@example.com"}, {}, "email-malformed"),
    ({"email": 7}, {}, "email-malformed"),
    ({"email": "ada@exam\u212ale.com"}, {}, "email-not-ascii"),  # a Kelvin sign, whose lower case is k
    (UNKNOWN, {"email": "ada@example.com"}, "no-verification"),
    (UNKNOWN, {"email_verified": True}, "no-verification"),  # of another one
    ({"email_verified": False, "xms_edov": True}, {}, "not-verified"),
    ({"email_verified": "True"}, {}, "not-verified"),
    ({"email_verified": 1}, {}, "not-verified"),
    (UNKNOWN, {"email": "ada@example.com", "email_verified": "false"}, "not-verified"),
    ({"email": ..., "email_verified": False}, {"email": "ada@example.com"}, "not-verified"),
    (UNKNOWN | {"xms_edov": "0"}, {}, "not-verified"),
]


async def test_addresses(openid: OpenId, idp: FakeIdentityProvider) -> None:
    """The log says why one is refused. Without a verification it suffices if the operator trusts the provider."""
    trusted = {"no-verification", "no-userinfo"}
    async with make_openid(idp.address, openid._store, trusting=True) as trusting:
        for claims, userinfo, reason in ADDRESSES:
            # The person can do something about it only in one case.
            advice = "verify your address there" if reason == "not-verified" else "tell the operator"
            idp.token_answer = {"access_token": None} if userinfo is None else {}
            for each, is_accepted in ((openid, reason is None), (trusting, reason in (None, *trusted))):
                email = new_email()
                idp.userinfo = {"sub": email, **(userinfo or {})}
                if is_accepted:
                    assert (await complete(each, idp, email, **claims)).email.endswith("@example.com"), claims
                else:
                    with capture_logs() as log, pytest.raises(AddressNotVerified, match=advice):
                        await complete(each, idp, email, **claims)
                    assert [(line["reason"], line["detail"]) for line in log] == [(reason, None)], claims


PROVIDER_FAULTS: list[tuple[str, Script]] = [
    ("/token", [Head(503, {"Content-Length": "0"})]),
    ("/token", answer(401, {"error": "invalid_client"})),  # a wrong secret
    ("/token", answer(400, {"error": "invalid_client"})),  # a wrong secret at Cognito
    ("/userinfo", answer(403, {"error": "insufficient_scope"})),  # refuses its own access token
]


async def test_the_person_pays_for_no_fault_of_the_provider(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    await leave_one_attempt(visitor)
    for path, script in PROVIDER_FAULTS:
        brought = idp.grant(await begin(visitor), new_email(), email_verified=...)
        idp.faults = {path: script}
        assert_page(await come_back(visitor, brought), 503)
        idp.faults = {}
    for error in ("server_error", "temporarily_unavailable"):
        state = idp.grant(await begin(visitor), new_email())["state"]
        assert_page(await come_back(visitor, {"state": state, "error": error}), 503)
    assert prompt(await begin(visitor)) is None
    await sign_in(visitor, idp, new_email())


# -- another account -----------------------------------------------------------------------------------------


def prompt(location: str) -> str | None:
    return parse_qs(urlsplit(location).query).get("prompt", [None])[0]


async def test_who_logged_out_or_is_refused_may_select_an_account(visitor: Visitor, idp: FakeIdentityProvider) -> None:
    """Only once: a provider without it must not keep anybody out."""
    for path in ("/dashboard/session", "/ops/session", "/dashboard/session?everywhere=true"):
        await sign_in(visitor, idp, new_email())
        assert prompt(await begin(visitor)) is None
        assert (await visitor.call("DELETE", path)).status_code == 204
        assert [prompt(await begin(visitor, "?page=ops")) for _ in range(2)] == ["select_account", None]
    assert_page(await come_back(visitor, idp.grant(await begin(visitor), "x", email_verified=False)), 403)
    location = await begin(visitor)
    assert prompt(location) == "select_account"
    assert (await come_back(visitor, idp.grant(location, new_email()))).headers["location"] == "/dashboard"


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
