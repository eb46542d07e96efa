"""The custom domains of an app, one of which is the primary, against a DNS server over UDP."""

import asyncio
import json
import secrets
from typing import Any
from urllib.parse import quote

import dns.rcode
import httpx
import pytest

from gateway.accounts.domain_names import check_own_domain
from gateway.accounts.domain_observations import Certificate, write_certificates, write_missing
from gateway.errors import RequestMalformed
from gateway.ids import now_iso
from gateway.keys import app_key, certificate_key, domain_check_key, domain_key, partition_tag
from gateway.settings import Settings
from tests.fakes import FakeAppBackend
from tests.support.accounts import DOMAIN, App
from tests.support.dns_server import DnsServer
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def call(
    app: App, method: str, domain: str | None = None, body: Any = None, *, verify: bool = False
) -> httpx.Response:
    """Calls a route of a domain, of all of them (""), or of the primary by its own routes (None)."""
    path = f"/account/apps/{app.name}/domain" + ("" if domain is None else "s")
    path += f"/{quote(domain, safe='')}" if domain else ""
    return await app.account.call(method, f"{path}/verify" if verify else path, body)


async def accepted(app: App, method: str, domain: str | None = None, body: Any = None, *, verify: bool = False) -> Any:
    response = await call(app, method, domain, body, verify=verify)
    assert response.status_code == 200, response.text
    return response.json()


async def listed(app: App) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = await accepted(app, "GET", "")
    assert [row["primary"] for row in rows] == [True, *[False] * (len(rows) - 1)][: len(rows)]
    return rows


async def names(app: App) -> list[str]:
    return [row["domain"] for row in await listed(app)]


async def put(app: App, domain: str, body: Any = None) -> Any:
    return await accepted(app, "PUT", domain, body)


async def prove(app: App, resolver: DnsServer, domain: str) -> None:
    record = (await put(app, domain))["records"][0]
    resolver.sets(record["name"], record["value"])
    assert (await accepted(app, "POST", domain, verify=True))["verified"]


async def may_ask(app: App, domain: str) -> bool:
    """Returns whether pages of the domain may call inference."""
    response = await app.post({"prompt": ""}, headers=app.headers(Origin=f"https://{domain}"))
    assert response.status_code in (400, 403), response.text
    return response.status_code == 400


async def is_certified(gw: Gateway, domain: str) -> bool:
    return (await gw.http.get("/platform/tls/allow", params={"domain": domain})).status_code == 200


async def show_primary(app: App) -> Any:
    return await accepted(app, "GET")


async def put_primary(app: App, domain: str) -> Any:
    return await accepted(app, "PUT", body={"domain": domain})


async def verify_primary(app: App) -> Any:
    return await accepted(app, "POST", verify=True)


def claimed(app: App, domain: str) -> bool:
    with app.gateway.redis.client() as client:
        return bool(client.exists(domain_key(domain)))


def stored(app: App) -> Any:
    """Returns the app's record."""
    with app.gateway.redis.client() as client:
        return json.loads(client.get(app_key(app.name)))


@pytest.fixture
def domain() -> str:
    return f"shop-{secrets.token_hex(4)}.example.com"


async def test_apex_and_www(app: App, gw: Gateway, resolver: DnsServer, domain: str) -> None:
    www = f"www.{domain}"
    assert await listed(app) == []
    first = await put(app, domain)
    assert (first["primary"], first["verified"]) == (True, False)
    second = await put(app, www)
    assert (second["primary"], second["verified"]) == (False, False)
    assert await listed(app) == [first, second]
    # The record of one proves nothing for the other.
    assert first["records"][0]["value"] != second["records"][0]["value"]
    resolver.sets(f"_capsule.{www}", first["records"][0]["value"])
    assert "another value" in (await call(app, "POST", www, verify=True)).json()["problem"]
    # Each is served and may ask once it is verified.
    for proven, verified in ((domain, [True, False]), (www, [True, True])):
        await prove(app, resolver, proven)
        assert [await may_ask(app, each) for each in (domain, www)] == verified
        assert [await is_certified(gw, each) for each in (domain, www)] == verified
    [row] = (await app.account.get("/account/apps")).json()
    assert row["domains"] == [{"domain": domain, "verified": True}, {"domain": www, "verified": True}]
    # Another primary: both stay verified, and the old call shows it.
    assert await put(app, www, {"primary": True}) == {**second, "primary": True, "verified": True}
    assert await names(app) == [www, domain]
    assert (await show_primary(app))["domain"] == www
    assert [await may_ask(app, each) for each in (domain, www)] == [True, True]
    # What is removed is free, and the next one is the primary.
    assert (await call(app, "DELETE", www)).status_code == 204
    assert await names(app) == [domain]
    assert [await may_ask(app, each) for each in (domain, www)] == [True, False]
    assert [await is_certified(gw, each) for each in (domain, www)] == [True, False]
    trail = (await app.account.get("/account/audit")).json()
    assert (trail[0]["action"], trail[0]["target"]) == ("remove_domain", f"{app.name}/{www}")
    refused(await call(app, "DELETE", www), 404, "NOT_FOUND")
    refused(await call(app, "POST", www, verify=True), 404, "NOT_FOUND")


async def test_at_most_five(app: App, domain: str) -> None:
    answers = await asyncio.gather(*[call(app, "PUT", f"d{number}.{domain}") for number in range(8)])
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [409] * 3
    first, *others, last = await names(app)
    for body in (None, {"primary": True}):
        error = refused(await call(app, "PUT", f"sixth.{domain}", body), 409, "DOMAIN_LIMIT_REACHED")
        assert "5 domains" in error["message"]
    assert (await put(app, last, {"primary": True}))["primary"], "one that it has is no sixth"
    assert await names(app) == [last, first, *others]
    await put_primary(app, f"new.{domain}")  # it takes the place of the primary
    assert await names(app) == [f"new.{domain}", first, *others]


async def test_the_first_is_the_primary_until_another_is(app: App, domain: str) -> None:
    for put_now, body, expected in (
        (f"a.{domain}", {"primary": False}, ["a"]),
        (f"b.{domain}", {}, ["a", "b"]),
        (f"c.{domain}", {"primary": True}, ["c", "a", "b"]),
        (f"b.{domain}", {"primary": False}, ["c", "a", "b"]),
        (f"b.{domain}", {"primary": True}, ["b", "c", "a"]),
    ):
        await put(app, put_now, body)
        assert await names(app) == [f"{name}.{domain}" for name in expected]
    # The old calls are about the primary.
    assert (await put_primary(app, f"a.{domain}"))["primary"]
    assert (await call(app, "DELETE")).status_code == 204
    assert (await show_primary(app))["domain"] == f"b.{domain}"


async def test_changes_at_once_are_all_made(app: App, resolver: DnsServer, domain: str) -> None:
    """A verification during changes of the others verifies, and loses none of these."""
    record = (await put_primary(app, domain))["records"][0]
    resolver.sets(record["name"], record["value"])
    changes = [call(app, "PUT", f"{name}.{domain}", {"primary": name == "d"}) for name in "abcd"]
    answers = await asyncio.gather(call(app, "POST", domain, verify=True), *changes)
    assert {answer.status_code for answer in answers} == {200}
    rows = {row["domain"]: row for row in await listed(app)}
    assert rows.keys() == {domain, *(f"{name}.{domain}" for name in "abcd")}
    assert (rows[domain]["verified"], rows[f"d.{domain}"]["primary"]) == (True, True)
    # A domain that is replaced meanwhile is not verified, and its claim is released.
    record = (await put_primary(app, f"late.{domain}"))["records"][0]
    resolver.sets(record["name"], record["value"])
    replacing = call(app, "PUT", None, {"domain": f"new.{domain}"})
    answers = await asyncio.gather(call(app, "POST", verify=True), replacing)
    assert {answer.status_code for answer in answers} <= {200, 404}
    shown = await show_primary(app)
    assert (shown["domain"], shown["verified"]) == (f"new.{domain}", False)
    assert not claimed(app, f"late.{domain}")


async def test_what_operators_put(app: App, gw: Gateway, resolver: DnsServer, domain: str) -> None:
    """It is verified without a record. The others stay, and a proven domain stays proven."""
    www, new = f"www.{domain}", f"new.{domain}"
    verified = {"account": app.account.id, "customDomain": domain, "customDomainVerified": True}
    assert (await gw.platform("PUT", f"apps/{app.name}", verified)).status_code == 200
    assert stored(app)["customDomainVerified"]
    assert not stored(app).get("customDomainProven", False)
    assert (await verify_primary(app))["problem"]
    assert (await show_primary(app))["verified"]
    assert (await call(app, "DELETE")).status_code == 204
    for each in (domain, www):
        await prove(app, resolver, each)
        assert app.name in (await gw.platform("GET", f"apps?search={each}")).text

    async def operator_puts(**fields: Any) -> list[tuple[str, bool]]:
        response = await gw.platform("PUT", f"apps/{app.name}", {"account": app.account.id, **fields})
        assert response.status_code == 200, response.text
        return [(row["domain"], row["verified"]) for row in response.json()["domains"]]

    assert await operator_puts(customDomain=domain, customDomainVerified=True) == [(domain, True), (www, True)]
    assert all(each["proven"] for each in stored(app)["domains"])
    assert await operator_puts(customDomain=www, customDomainVerified=True) == [(www, True), (domain, True)]
    assert await operator_puts(customDomain=new) == [(new, False), (domain, True)]
    assert not stored(app).get("customDomainProven", False)
    other = await gw.account()
    assert await operator_puts(customDomain=new, account=other.id) == [(new, False)], "not another account's"
    assert not await is_certified(gw, domain)
    assert await operator_puts(account=other.id) == []
    assert not [name for name in (domain, www, new) if claimed(app, name)]
    assert (await gw.platform("GET", "apps?search=" + www)).json()["apps"] == []


# -- the primary, by its own calls ----------------------------------------------------------------------------


async def test_from_nothing_to_verified_and_back(app: App, resolver: DnsServer, domain: str) -> None:
    for method, verify in (("GET", False), ("POST", True), ("DELETE", False)):
        refused(await call(app, method, verify=verify), 404, "NOT_FOUND")
    view = await put_primary(app, domain)
    assert view.keys() == {"domain", "primary", "verified", "records"}
    assert (view["domain"], view["primary"], view["verified"]) == (domain, True, False)
    txt, cname = view["records"]
    assert (txt["type"], txt["name"], len(txt["value"])) == ("TXT", f"_capsule.{domain}", 40)
    assert cname == {"type": "CNAME", "name": domain, "value": f"{app.name}.{DOMAIN}"}
    assert await show_primary(app) == view
    assert not await may_ask(app, domain)

    missing = f"There is no TXT record at _capsule.{domain}."
    assert await verify_primary(app) == {**view, "problem": missing}
    resolver.sets(txt["name"], "something else")
    assert (await verify_primary(app))["problem"] == f"The TXT record at _capsule.{domain} has another value."
    assert not await may_ask(app, domain)
    resolver.sets(txt["name"], "something else", (txt["value"][:7], txt["value"][7:]), "v=spf1 -all")
    assert await verify_primary(app) == {**view, "verified": True}
    assert await show_primary(app) == {**view, "verified": True}
    assert await may_ask(app, domain)
    [row] = (await app.account.get("/account/apps")).json()
    assert (row["customDomain"], row["customDomainVerified"]) == (domain, True)

    # The same domain again, written differently, stays verified. A removed record does not count at once.
    assert await put_primary(app, f"{domain.upper()}.") == {**view, "verified": True}
    resolver.sets(txt["name"])
    assert await verify_primary(app) == {**view, "verified": True, "problem": missing}

    assert (await call(app, "DELETE")).status_code == 204
    refused(await call(app, "GET"), 404, "NOT_FOUND")
    assert not await may_ask(app, domain)
    assert not claimed(app, domain)


async def test_a_domain_belongs_to_the_app_that_verified_it(
    app: App, gw: Gateway, backend: FakeAppBackend, resolver: DnsServer, domain: str
) -> None:
    stranger, sibling = await gw.app(backend), await app.account.app(app.backend)
    for each in (app, stranger, sibling):  # several apps may prepare the same domain
        await put_primary(each, domain)
    # The record of one app proves nothing for another.
    resolver.sets(f"_capsule.{domain}", (await show_primary(app))["records"][0]["value"])
    for each in (stranger, sibling):
        assert "another value" in (await verify_primary(each))["problem"]
    assert (await verify_primary(app))["verified"]
    await put(app, f"www.{domain}", {"primary": True})

    # Not even with a record of its own, as long as the domain belongs to the first app.
    records = [(await listed(each))[-1]["records"][0]["value"] for each in (app, stranger, sibling)]
    resolver.sets(f"_capsule.{domain}", *records)
    for each in (stranger, sibling):
        refused(await call(each, "POST", verify=True), 409, "NAME_TAKEN")
        assert not (await show_primary(each))["verified"]
        assert not await may_ask(each, domain)
        for written in (domain, domain.title(), f"{domain}."):
            refused(await call(each, "PUT", None, {"domain": written}), 409, "NAME_TAKEN")
            refused(await call(each, "PUT", written), 409, "NAME_TAKEN")
    body = {"account": stranger.account.id, "customDomain": domain, "customDomainVerified": True}
    refused(await gw.platform("PUT", f"apps/{stranger.name}", body), 409, "NAME_TAKEN")
    assert await may_ask(app, domain)

    await gw.platform("DELETE", f"apps/{app.name}")
    assert (await verify_primary(stranger))["verified"]
    assert await may_ask(stranger, domain)


# How names are written, and the one form that is kept.
FORMS = {
    "BÜCHER.shop.Example.": "xn--bcher-kva.shop.example",
    "straße.example": "xn--strae-oqa.example",
    "例え。テスト": "xn--r8jz45g.xn--zckzah",
    "ＳＨＯＰ.example": "shop.example",
    "\u00a0shop.Example. \n": "shop.example",
    "i❤️.example": "xn--i-7iq.example",
}


async def test_one_form_of_each_name(app: App, resolver: DnsServer) -> None:
    for written, kept in FORMS.items():
        assert check_own_domain(written, Settings()) == kept, written
    unique = secrets.token_hex(4)
    view = await put_primary(app, f" BÜCHER.{unique}.Example.\n")
    assert view["domain"] == f"xn--bcher-kva.{unique}.example"
    resolver.sets(view["records"][0]["name"], view["records"][0]["value"])
    assert (await verify_primary(app))["verified"]
    assert resolver.asked[-1] == f"_capsule.xn--bcher-kva.{unique}.example"


# Why a name is refused, and such names.
REFUSED: dict[str, list[str]] = {
    "one label": ["", ".", "com", "localhost"],
    "an empty label": ["example..com", ".example.com", "example.com..", "☃.exa..mple"],
    "characters": ["-a.example.com", "a-.example.com", "a_b.example.com", "_capsule.example.com", "*.example.com"],
    "more than a name": ["https://example.com", "example.com/", "example.com:443", "user@example.com"],
    "white space": ["exa mple.com", "example.com\0", "example.com\r\nX: y"],
    "an address": ["192.0.2.1", "127.1", "0x7f.1", "2130706433", "[::1]", "2001:db8::1", "example.123"],
    "too long": ["a" * 64 + ".example.com", ".".join(["a" * 60] * 4) + ".example", "ü" * 63 + ".example"],
    "no punycode": ["xn--a.example", "xn--99999999999.example", "XN--A.example", "shop.xn--zckzah-"],
    "joined letters": ["\u0661.example\u200d", "a\u200db.example", "xn--ab-m1t.example"],
    "marks and directions": ["\u0301a.example", "1\u05d0.example", "\u202eexample.com"],
    "of the service": ["apps.service.example", "Shop.apps.service.example.", "API.service.example"],
    "below its names": ["x.api.service.example"],
    "never on the internet": ["shop.localhost", "shop.local", "shop.internal", "shop.onion", "shop.home.arpa"],
}
SERVICE = Settings(
    base_url="https://api.service.example",
    api_url="https://hooks.service.example:8443",
    apps_domain="apps.service.example:8443",
)


async def test_refused_names(app: App) -> None:
    for reason, texts in REFUSED.items():
        for text in texts:
            with pytest.raises(RequestMalformed, match=r"^domain: ") as raised:
                check_own_domain(text, SERVICE)
            if reason == "never on the internet":
                assert "internal use" in str(raised.value)
    for text in ("www.service.example", "myapps.service.example", "service.example"):
        assert check_own_domain(text, SERVICE) == text
    for text in (DOMAIN, f"shop.{DOMAIN}", "localhost"):
        message = refused(await call(app, "PUT", None, {"domain": text}), 400, "REQUEST_MALFORMED")["message"]
        assert message.startswith("domain: "), text
    for body in (None, {"domain": "a.example", "verified": True}):
        refused(await call(app, "PUT", None, body), 400, "REQUEST_MALFORMED")
    for body in ([], {"primary": "yes"}, {"primary": None}, {"verified": True}, {"domain": "a.example"}):
        refused(await call(app, "PUT", "a.example", body), 400, "REQUEST_MALFORMED")
    for method, verify in (("PUT", False), ("DELETE", False), ("POST", True)):
        refused(await call(app, method, "a_b.example.com", verify=verify), 400, "REQUEST_MALFORMED")
    refused(await call(app, "GET"), 404, "NOT_FOUND")


async def test_a_dns_that_fails(app: App, resolver: DnsServer, domain: str) -> None:
    view, name = await put_primary(app, domain), f"_capsule.{domain}"
    resolver.failing[name] = dns.rcode.SERVFAIL
    problem = f"The DNS did not answer for {name}. Try again in a minute."
    assert await verify_primary(app) == {**view, "problem": problem}


async def test_ten_verifications_a_minute(app: App, resolver: DnsServer, domain: str) -> None:
    sibling = await app.account.app(app.backend)
    for each in (app, sibling):
        await put_primary(each, domain)
    answers = [await call(app, "POST", verify=True) for _ in range(11)]
    assert [answer.status_code for answer in answers] == [200] * 10 + [429]
    refused(answers[-1], 429, "RATE_LIMITED")
    assert resolver.asked.count(f"_capsule.{domain}") == 10
    assert (await call(sibling, "POST", verify=True)).status_code == 200


async def test_the_record_is_the_apps_own(app: App, gw: Gateway, domain: str) -> None:
    """It stays the same for a renamed app, and is another one for an app of the same name that is created later."""
    value = (await put_primary(app, domain))["records"][0]["value"]
    body = {"account": app.account.id, "customDomain": domain}
    name = app.name
    await gw.platform("PUT", f"apps/{name}", {**body, "name": f"{name}-new"})
    app.name = f"{name}-new"
    renamed = (await show_primary(app))["records"]
    assert [record["value"] for record in renamed] == [value, f"{name}-new.{DOMAIN}"]
    other = await gw.account()
    await gw.platform("PUT", f"apps/{app.name}", {**body, "account": other.id})
    moved = App(other, app.name, app.backend)
    assert (await show_primary(moved))["records"][0]["value"] != value
    await gw.platform("DELETE", f"apps/{app.name}")
    await gw.platform("PUT", f"apps/{name}", body)
    app.name = name
    assert (await show_primary(app))["records"][0]["value"] != value


async def test_the_certificate_and_a_missing_record(app: App, gw: Gateway, resolver: DnsServer, domain: str) -> None:
    for each in (domain, f"www.{domain}"):
        await prove(app, resolver, each)
    tag, ends, late = partition_tag(app.account.id), 1_900_000_000_000, 1_990_000_000_000
    with gw.redis.client() as client:
        for name, issuer in (("former.example", "An Authority"), (domain, "")):
            known = write_certificates({name: Certificate("f", ends, issuer)})
            client.hset(certificate_key(tag, app.name), mapping=known)
            expected = {"issuer": None, "expiresAt": now_iso(ends / 1000)} if name == domain else None
            assert (await show_primary(app)).get("certificate") == expected
        known = {domain: Certificate("a", late, "A"), f"www.{domain}": Certificate("b", ends, "B")}
        client.hset(certificate_key(tag, app.name), mapping=write_certificates(known))
        assert [row["certificate"]["issuer"] for row in await listed(app)] == ["A", "B"]
        details = (await app.account.get(f"/account/apps/{app.name}")).json()
        assert details["certificate"]["domain"] == f"www.{domain}", "the one that ends first"
        client.hset(domain_check_key(tag, app.name), mapping=write_missing({domain: ends, "other.example": ends}))
        problem = (await show_primary(app))["problem"]
        assert "is missing. Restore it" in problem
        assert now_iso(ends / 1000 + 7 * 86_400) in problem
        assert "problem" not in await verify_primary(app)
        assert "problem" not in await show_primary(app), "the record was just there"
        assert json.loads(client.hget(domain_check_key(tag, app.name), "missing")) == {"other.example": ends}
