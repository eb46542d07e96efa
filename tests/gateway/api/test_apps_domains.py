"""The custom domains of an app, one of which is the primary."""

import asyncio
import json
import secrets
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gateway.accounts.domain_observations import Certificate, write_certificates
from gateway.keys import app_key, certificate_key, domain_key, partition_tag
from tests.fakes import FakeAppBackend
from tests.support.accounts import App
from tests.support.dns_server import DnsServer
from tests.support.gateway_process import Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def call(app: App, method: str, domain: str = "", body: Any = None, *, verify: bool = False) -> httpx.Response:
    path = f"/account/apps/{app.name}/domains"
    path += f"/{quote(domain, safe='')}" if domain else ""
    return await app.account.call(method, f"{path}/verify" if verify else path, body)


async def listed(app: App) -> list[dict[str, Any]]:
    response = await call(app, "GET")
    assert response.status_code == 200, response.text
    return response.json()


async def names(app: App) -> list[str]:
    rows = await listed(app)
    assert [row["primary"] for row in rows] == [True, *[False] * (len(rows) - 1)][: len(rows)]
    return [row["domain"] for row in rows]


async def put(app: App, domain: str, body: Any = None) -> dict[str, Any]:
    response = await call(app, "PUT", domain, body)
    assert response.status_code == 200, response.text
    return response.json()


async def prove(app: App, resolver: DnsServer, domain: str) -> None:
    record = (await put(app, domain))["records"][0]
    resolver.sets(record["name"], record["value"])
    response = await call(app, "POST", domain, verify=True)
    assert (response.status_code, response.json()["verified"]) == (200, True), response.text


async def may_ask(app: App, domain: str) -> bool:
    """Returns whether pages of the domain may call inference."""
    response = await app.post({"prompt": ""}, headers=app.headers(Origin=f"https://{domain}"))
    assert response.status_code in (400, 403), response.text
    return response.status_code == 400


async def is_certified(gw: Gateway, domain: str) -> bool:
    return (await gw.http.get("/platform/tls/allow", params={"domain": domain})).status_code == 200


@pytest.fixture
def apex() -> str:
    return f"{secrets.token_hex(4)}.example.org"


async def test_apex_and_www(app: App, gw: Gateway, resolver: DnsServer, apex: str) -> None:
    www = f"www.{apex}"
    assert await listed(app) == []
    first = await put(app, apex)
    assert (first["primary"], first["verified"]) == (True, False)
    second = await put(app, www)
    assert (second["primary"], second["verified"]) == (False, False)
    assert await listed(app) == [first, second]
    # The record of one proves nothing for the other.
    assert first["records"][0]["value"] != second["records"][0]["value"]
    resolver.sets(f"_capsule.{www}", first["records"][0]["value"])
    assert "another value" in (await call(app, "POST", www, verify=True)).json()["problem"]
    # One is verified after the other, and each is served and may ask once it is.
    for domain, verified in ((apex, [True, False]), (www, [True, True])):
        await prove(app, resolver, domain)
        assert [await may_ask(app, each) for each in (apex, www)] == verified
        assert [await is_certified(gw, each) for each in (apex, www)] == verified
    [account_row] = [row for row in (await app.account.get("/account/apps")).json() if row["name"] == app.name]
    assert account_row["domains"] == [{"domain": apex, "verified": True}, {"domain": www, "verified": True}]
    # Another primary: both stay verified, and the old call shows it.
    assert await put(app, www, {"primary": True}) == {**second, "primary": True, "verified": True}
    assert await names(app) == [www, apex]
    assert (await app.account.get(f"/account/apps/{app.name}/domain")).json()["domain"] == www
    assert [await may_ask(app, each) for each in (apex, www)] == [True, True]
    # What is removed is free, and the next one is the primary.
    assert (await call(app, "DELETE", www)).status_code == 204
    assert (await put(app, f" {apex.upper()}. "))["domain"] == apex, "every spelling is the same domain"
    assert await names(app) == [apex]
    assert [await may_ask(app, each) for each in (apex, www)] == [True, False]
    assert [await is_certified(gw, each) for each in (apex, www)] == [True, False]
    trail = (await app.account.get("/account/audit")).json()
    assert (trail[0]["action"], trail[0]["target"]) == ("remove_domain", f"{app.name}/{www}")
    refused(await call(app, "DELETE", www), 404, "NOT_FOUND")
    refused(await call(app, "POST", www, verify=True), 404, "NOT_FOUND")


async def test_at_most_five(app: App, apex: str) -> None:
    five = [f"d{number}.{apex}" for number in range(5)]
    answers = await asyncio.gather(*[call(app, "PUT", f"d{number}.{apex}") for number in range(8)])
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [409] * 3
    for domain in await names(app):
        assert (await call(app, "DELETE", domain)).status_code == 204
    for domain in five:
        await put(app, domain)
    error = refused(await call(app, "PUT", f"sixth.{apex}"), 409, "DOMAIN_LIMIT_REACHED")
    assert "5 domains" in error["message"]
    refused(await call(app, "PUT", f"sixth.{apex}", {"primary": True}), 409, "DOMAIN_LIMIT_REACHED")
    assert (await put(app, five[3], {"primary": True}))["primary"], "one that it has is no sixth"
    assert await names(app) == [five[3], *five[:3], five[4]]
    response = await app.account.call("PUT", f"/account/apps/{app.name}/domain", {"domain": f"new.{apex}"})
    assert response.status_code == 200, "it takes the place of the primary"
    assert await names(app) == [f"new.{apex}", *five[:3], five[4]]


async def test_the_first_is_the_primary_until_another_is(app: App, apex: str) -> None:
    for domain, body, expected in (
        (f"a.{apex}", {"primary": False}, ["a"]),
        (f"b.{apex}", {}, ["a", "b"]),
        (f"c.{apex}", {"primary": True}, ["c", "a", "b"]),
        (f"b.{apex}", {"primary": False}, ["c", "a", "b"]),
        (f"c.{apex}", {"primary": False}, ["c", "a", "b"]),
        (f"b.{apex}", {"primary": True}, ["b", "c", "a"]),
    ):
        await put(app, domain, body)
        assert await names(app) == [f"{name}.{apex}" for name in expected]
    # The old calls are about the primary.
    path = f"/account/apps/{app.name}/domain"
    assert (await app.account.call("PUT", path, {"domain": f"a.{apex}"})).json()["primary"]
    assert await names(app) == [f"{name}.{apex}" for name in ("a", "b", "c")]
    assert (await app.account.call("DELETE", path)).status_code == 204
    assert (await app.account.get(path)).json()["domain"] == f"b.{apex}"


async def test_refusals(app: App, gw: Gateway, backend: FakeAppBackend, resolver: DnsServer, apex: str) -> None:
    await prove(app, resolver, apex)
    for body in ([], {"primary": "yes"}, {"primary": None}, {"verified": True}, {"domain": apex}):
        refused(await call(app, "PUT", f"www.{apex}", body), 400, "REQUEST_MALFORMED")
    for domain in ("localhost", "https:", "a_b.example.com", "*.example.com", "192.0.2.1"):
        for method, verify in (("PUT", False), ("DELETE", False), ("POST", True)):
            refused(await call(app, method, domain, verify=verify), 400, "REQUEST_MALFORMED")
    # A verified domain is its app's, primary or not.
    other = await gw.app(backend)
    await put(app, f"www.{apex}", {"primary": True})
    refused(await call(other, "PUT", apex), 409, "NAME_TAKEN")
    assert await names(other) == []


async def test_changes_at_once_are_all_made(app: App, resolver: DnsServer, apex: str) -> None:
    """A verification during changes of the others verifies, and loses none of these."""
    await put(app, apex)
    resolver.sets(f"_capsule.{apex}", (await listed(app))[0]["records"][0]["value"])
    answers = await asyncio.gather(
        call(app, "POST", apex, verify=True),
        *[call(app, "PUT", f"{name}.{apex}") for name in "abc"],
        call(app, "PUT", f"d.{apex}", {"primary": True}),
    )
    assert {answer.status_code for answer in answers} == {200}
    rows = {row["domain"]: row for row in await listed(app)}
    assert rows.keys() == {apex, *(f"{name}.{apex}" for name in "abcd")}
    assert rows[apex]["verified"]
    assert rows[f"d.{apex}"]["primary"]


async def test_each_has_its_own_certificate(app: App, gw: Gateway, resolver: DnsServer, apex: str) -> None:
    for domain in (apex, f"www.{apex}"):
        await prove(app, resolver, domain)
    early, late = 1_900_000_000_000, 1_990_000_000_000
    known = write_certificates({apex: Certificate("a", late, "A"), f"www.{apex}": Certificate("b", early, "B")})
    with gw.redis.client() as client:
        client.hset(certificate_key(partition_tag(app.account.id), app.name), mapping=known)
    assert [row["certificate"]["issuer"] for row in await listed(app)] == ["A", "B"]
    details = (await app.account.get(f"/account/apps/{app.name}")).json()
    assert (details["certificate"]["domain"], details["certificate"]["issuer"]) == (f"www.{apex}", "B")
    assert details["certificateExpiresAt"] == details["certificate"]["expiresAt"], "the one that ends first"


async def test_an_operators_put_keeps_the_others(app: App, gw: Gateway, resolver: DnsServer, apex: str) -> None:
    www, new = f"www.{apex}", f"new.{apex}"
    for domain in (apex, www):
        await prove(app, resolver, domain)
        assert app.name in (await gw.platform("GET", f"apps?search={domain}")).text

    async def operator_puts(**fields: Any) -> list[tuple[str, bool]]:
        response = await gw.platform("PUT", f"apps/{app.name}", {"account": app.account.id, **fields})
        assert response.status_code == 200, response.text
        return [(row["domain"], row["verified"]) for row in response.json()["domains"]]

    assert await operator_puts(customDomain=apex, customDomainVerified=True) == [(apex, True), (www, True)]
    with gw.redis.client() as client:
        assert all(each["proven"] for each in json.loads(client.get(app_key(app.name)))["domains"])
    assert await operator_puts(customDomain=www, customDomainVerified=True) == [(www, True), (apex, True)]
    assert await operator_puts(customDomain=new) == [(new, False), (apex, True)]
    other = await gw.account()
    assert await operator_puts(customDomain=new, account=other.id) == [(new, False)], "not another account's"
    assert not await is_certified(gw, apex)
    assert await operator_puts(account=other.id) == []
    with gw.redis.client() as client:
        assert not [name for name in (apex, www, new) if client.exists(domain_key(name))]
    found = (await gw.platform("GET", "apps?search=" + www)).json()
    assert [each for each in json.dumps(found).split('"') if each == app.name] == []
