"""The custom domains of an app: all lead to it, and visitors of the others are redirected to the primary one."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.accounts.records import App, Domain, replace_domains
from gateway.deploys.addresses import hosts_of
from gateway.settings import Settings
from tests.support.folders import passable_folder
from tests.support.hosted_apps import DOMAIN, HOST, Hosting
from workers.engine.driver import Place
from workers.hosting.driver import HostPlaces

SHOP = App(id="shop", name="shop", account="acc_1", createdAt="2026-07-02T10:00:00.000Z")
APEX, WWW, EMOJI = "example.org", "www.example.org", "xn--e28h.example.org"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosting() -> AsyncIterator[Hosting]:
    with passable_folder() as folder:
        hosting = Hosting(folder)
        hosting.publish("dep_1", {"index.html": "shop"})
        async with hosting.served():
            yield hosting


@pytest.fixture
def places(hosting: Hosting) -> HostPlaces:
    return HostPlaces(Settings(apps_domain=DOMAIN, apps_url="https://{host}"), hosting.releases)


async def serve(places: HostPlaces, *domains: Domain) -> Place:
    """Serves the app at these domains, the first of which is the primary. Returns the place as it is then."""
    [place] = await places.list_places("shop")
    await places.rename(place, hosts_of(replace_domains(SHOP, domains), "live", DOMAIN))
    [place] = await places.list_places("shop")
    return place


async def test_the_others_redirect_to_the_primary(hosting: Hosting, places: HostPlaces) -> None:
    verified = [Domain(name, verified=True) for name in (APEX, WWW, EMOJI)]
    place = await serve(places, *verified)
    assert place.hosts == {HOST: "", APEX: "", WWW: APEX, EMOJI: APEX}
    for path, kept in {
        "/": "/",
        "/none?": "/none?",
        "/a%20b/%2F/%C3%BC.html?q=%26&q=a+b&next=//a.example": "/a%20b/%2F/%C3%BC.html?q=%26&q=a+b&next=//a.example",
        "//evil.example/%2e%2e": "//evil.example/%2e%2e",
        "/{http.request.host}/{{.Host}}?{{now}}": "/%7Bhttp.request.host%7D/%7B%7B.Host%7D%7D?{{now}}",
        "/\xc3\xbc?q=\xc3\xbc": "/%C3%BC?q=\xc3\xbc",
        "/.well-known/x": "/.well-known/x",
    }.items():
        for host in (WWW, EMOJI, WWW.upper(), f"{WWW}.", f"{WWW}:8443"):
            for method in ("GET", "HEAD"):
                said = await hosting.ask(path, host=host, method=method)
                assert (said.status, said.body) == (308, b""), (host, method)
                assert said.headers["location"] == f"https://{APEX}{kept}", (host, method)
                assert said.headers["cache-control"] == "no-cache", "the primary may change"
    for host in (HOST, APEX):
        assert (await hosting.ask("/", host=host)).body == b"shop"
    for method in ("POST", "PUT", "OPTIONS"):  # the app's own answers
        assert (await hosting.ask("/", host=WWW, method=method)).status == 405


async def test_a_suspended_app_redirects_nobody(hosting: Hosting, places: HostPlaces) -> None:
    await serve(places, Domain(APEX, verified=True), Domain(WWW, verified=True))
    site = hosting.releases.find_site("shop")
    site.set_suspended(suspended=True)
    assert (await hosting.ask("/", host=WWW)).status == 503
    site.set_suspended(suspended=False)
    assert (await hosting.ask("/", host=WWW)).status == 308
