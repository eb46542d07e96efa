"""For which names the web server of this host may get certificates."""

import secrets
import time

import httpx
import pytest

from gateway.app import create_app
from gateway.keys import certified_names_key, domain_key
from gateway.settings import Settings
from tests.fakes import FakeAppBackend
from tests.gateway.conftest import Launch
from tests.support.accounts import DOMAIN, App
from tests.support.deploys import report_phases
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.responses import refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATH = "/platform/tls/allow"


async def ask(gateway: Gateway, name: str, **headers: str) -> httpx.Response:
    return await gateway.http.get(PATH, params={"domain": name}, headers=headers)


async def is_allowed(gateway: Gateway, name: str) -> bool:
    response = await ask(gateway, name)
    if response.status_code == 200:
        return True
    refused(response, 404, "NOT_FOUND")
    return False


async def put(app: App, **fields: object) -> None:
    response = await app.gateway.platform("PUT", f"apps/{app.name}", {"account": app.account.id, **fields})
    assert response.status_code == 200, response.text


async def go_live(app: App, **fields: str) -> None:
    response = await app.gateway.platform("POST", f"apps/{app.name}/deploys", fields)
    assert response.status_code == 202, response.text
    await report_phases(app.gateway, response.json()["deployId"], "build", "health")


async def test_addresses_of_apps(app: App, gw: Gateway) -> None:
    for name in (f"{app.name}.{DOMAIN}", f"{app.name.upper()}.{DOMAIN}", f"{app.name}.{DOMAIN}."):
        assert await is_allowed(gw, name)
    others = ["", "nothing.", f"a.{app.name}.", app.name, "*.", f"{app.name}:x.", f"{app.name}\n.", "--p-main."]
    previews = [f"{app.name}{end}." for end in ("-preview", "--p-main", "--p-", "-")]
    names = [f"{before}{DOMAIN}" for before in (*others, *previews)]
    for name in (*names, f"{app.name}.{DOMAIN}.evil.example", "", ".", "é", "x" * 254):
        assert not await is_allowed(gw, name), name
    await gw.platform("DELETE", f"apps/{app.name}")
    assert not await is_allowed(gw, f"{app.name}.{DOMAIN}")


async def test_previews_that_are_served(hosted: App, building: Gateway) -> None:
    await put(hosted, repository={"url": "https://git.example.com/app.git"})
    await go_live(hosted, kind="preview", branch="Feature/One")
    one, other, plain = (f"{hosted.name}{end}.{DOMAIN}" for end in ("--p-feature-one", "--p-feature-two", "-preview"))
    assert [await is_allowed(building, name) for name in (one, other, plain)] == [True, False, False]
    await go_live(hosted, kind="preview")
    assert [await is_allowed(building, name) for name in (one, other, plain)] == [True, False, True]
    await building.platform("DELETE", f"apps/{hosted.name}")
    assert [await is_allowed(building, name) for name in (one, plain)] == [False, False]


async def test_verified_custom_domains(app: App, gw: Gateway, backend: FakeAppBackend) -> None:
    domain = f"shop-{secrets.token_hex(4)}.example.com"
    await put(app, customDomain=domain)
    assert not await is_allowed(gw, domain)
    await put(app, customDomain=domain, customDomainVerified=True)
    assert await is_allowed(gw, domain)
    assert await is_allowed(gw, f"{domain.upper()}.")
    assert not await is_allowed(gw, f"www.{domain}")
    # The app that has the claim decides, whatever another record says.
    other = await gw.app(backend, customDomain=domain)
    with gw.redis.client() as client:
        client.set(domain_key(domain), f"{other.name} 0")
        assert not await is_allowed(gw, domain)
        client.set(domain_key(domain), f"{app.name} 0")
    assert await is_allowed(gw, domain)
    # An operator may have set one below the apps' domain, but it is not served.
    for name in (domain, f"other-{app.name}.{DOMAIN}", f"a.{app.name}.{DOMAIN}"):
        await put(app, customDomain=name, customDomainVerified=name != domain)
        assert not await is_allowed(gw, name)


async def test_the_services_own_names_and_the_limit_of_new_ones(launch: Launch, backend: FakeAppBackend) -> None:
    urls = {"GATEWAY_BASE_URL": "https://api.service.example", "GATEWAY_API_URL": "https://hooks.service.example:8443"}
    async with launch(GATEWAY_APP_LIMITS="free=1", GATEWAY_APPS_DOMAIN="apps.service.example:8443", **urls) as gw:
        for name in ("api.service.example", "HOOKS.service.example", "hooks.service.example."):
            assert await is_allowed(gw, name)
        for name in ("service.example", "www.service.example", "apps.service.example"):
            assert not await is_allowed(gw, name)
        account = await gw.account()
        assert (await account.call("POST", "/account/apps", {"name": "shop"})).status_code == 201
        assert await is_allowed(gw, "shop.apps.service.example")
        # New names of an account are limited.
        account = await gw.account("free")
        names = [f"{(await account.app(backend)).name}.apps.service.example" for _ in range(4)]
        key = certified_names_key(account.id)
        with gw.redis.client() as client:
            client.zadd(key, {f"{n}.apps.service.example": time.time() for n in range(19)})
        for _ in range(2):  # a known name is not new
            assert [await is_allowed(gw, name) for name in names] == [True, True, False, False]
        other = await gw.app(backend)
        assert await is_allowed(gw, f"{other.name}.apps.service.example"), "other accounts have their own limit"
        with gw.redis.client() as client:
            assert client.zcard(key) == 21
            assert 0 < client.ttl(key) <= 90 * 86_400
            for known in client.zrange(key, 0, -1):  # a week later
                client.zincrby(key, -7 * 86_400, known)
        assert [await is_allowed(gw, name) for name in names] == [True] * 4
        # Without Redis, nothing is allowed that it would have to confirm.
        gw.redis.stop()
        assert await is_allowed(gw, "api.service.example")
        for name in ("shop.apps.service.example", "new.apps.service.example", "shop.example.com"):
            refused(await ask(gw, name), 503, "BACKBONE_UNAVAILABLE")


async def test_nothing_that_a_proxy_forwards(app: App, gw: Gateway) -> None:
    unknown = await gw.http.get("/platform/tls/nothing")
    for header in ("Forwarded", "X-Forwarded-For", "x-forwarded-host", "X-Forwarded-Proto", "X-Real-IP", "Via"):
        for credential in ("", f"Bearer {OPERATOR}"):
            headers = {"Authorization": credential, header: "127.0.0.1"}
            response = await ask(gw, f"{app.name}.{DOMAIN}", **headers)
            assert (response.status_code, response.content) == (404, unknown.content), header
    assert (await gw.http.get(PATH)).status_code == 400
    assert (await gw.http.post(PATH)).status_code in (404, 405)


async def test_only_clients_on_this_host() -> None:
    settings = Settings(base_url="https://api.service.example", api_url="https://api.service.example")
    application = create_app(settings)
    own = ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1")
    for host in (*own, "192.168.0.7", "203.0.113.9", "2001:db8::1", "::ffff:203.0.113.9", "localhost", ""):
        transport = httpx.ASGITransport(application, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", verify=False) as http:
            response = await http.get(PATH, params={"domain": "api.service.example"})
            assert response.status_code == (200 if host in own else 404), host
