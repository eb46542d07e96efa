"""A real browser at the app's real address, with a real gateway. Only the provider is a fake."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from tests.browser import dashboard
from tests.browser.dashboard import Holder
from tests.browser.visitor import Site, Visitor, chromium, visiting
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.dns_server import DnsServer
from tests.support.fixtures import folder_fixture, provider, resolver
from tests.support.gateway_process import App, Gateway, gateway_with_redis
from tests.support.worker_process import Worker

__all__ = ["provider", "resolver"]

Visit = Callable[..., AbstractAsyncContextManager[Visitor]]

# Intervals, in seconds, at which counters and the operators' figures are written.
SOON = {"gateway.telemetry.counters.FLUSH_SECONDS": 0.2, "gateway.operations.overview.SNAPSHOT_SECONDS": 0.5}

EXAMPLE = 'https://demo.example.com/?a="><script>alert(1)</script>'

expect.set_options(timeout=40_000)  # a view of a machine that is busy rests up to 30 s between two refreshes
fixture = pytest_asyncio.fixture(loop_scope="session")


@folder_fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A blank page of a new visitor."""
    async with await browser.new_context(permissions=["clipboard-read", "clipboard-write"]) as context:
        yield await context.new_page()


@folder_fixture
async def backend() -> AsyncIterator[FakeAppBackend]:
    async with FakeAppBackend() as backend:
        yield backend


@folder_fixture
async def gw(
    provider: FakeProvider, resolver: DnsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """Starts the gateway for all modules. Each test has accounts of its own."""
    settings = {"GATEWAY_DEPLOY_ENGINE": "external", "GATEWAY_DNS": resolver.address, "GATEWAY_EXAMPLE_URL": EXAMPLE}
    async with gateway_with_redis(provider, tmp_path_factory.mktemp("gateway"), SOON, **settings) as running:
        yield running


@folder_fixture
async def worker(gw: Gateway) -> AsyncIterator[Worker]:
    """Starts a worker that delivers the events of `gw`."""
    async with Worker(gw.redis.url, gw.folder, confidential=gw.confidential) as worker:
        yield worker


@fixture
async def holder(browser: Browser, gw: Gateway) -> AsyncIterator[Holder]:
    """An account holder at the dashboard."""
    async with dashboard.visiting(browser, gw) as holder:
        yield holder


@fixture
async def app(gw: Gateway, backend: FakeAppBackend) -> App:
    return await gw.app(backend)


@fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as site:
        yield site


@fixture
async def visit(browser: Browser, site: Site) -> Visit:
    """Returns a function: `async with visit(app) as visitor:` opens a blank page of the app, or of the app `at`."""

    def visit(app: App, at: str | None = None) -> AbstractAsyncContextManager[Visitor]:
        if site.env == {}:
            site.env = {"VITE_SERVICE_AI_URL": app.gateway.address + app.path}
        if site.token is None:
            site.token = app.token()
        return visiting(browser, site, at or app.name)

    return visit


@fixture
async def visitor(visit: Visit, app: App) -> AsyncIterator[Visitor]:
    async with visit(app) as visitor:
        yield visitor
