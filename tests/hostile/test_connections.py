"""Thousands of connections that never become a request."""

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.hostile.bystander import (
    Bystander,
    Figures,
    assert_unharmed,
    attacked,
    descriptors,
    measure,
    process_of,
    report,
    scaled,
)
from tests.hostile.conftest import attackable
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")

ATTACKS = {
    "heads that drip": ("drip", b"POST /capsule/x/ai HTTP/1.1\r\nhost: x\r\nx: "),
    "silence": ("drip", b""),
    "bodies that drip": ("drip", request("/register", b"", "Content-Length: 60000") + b"{"),
    "line breaks after an answer": ("breaks", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_connections_that_are_held(honest: Bystander, attack: str) -> None:
    count = scaled(5000)
    during = await figures(honest, attack, count, f"{count:,} connections: {attack}")
    assert during.descriptors <= honest.before.descriptors + count + 20
    assert during.memory - honest.before.memory < 30 + count * 0.03


async def figures(honest: Bystander, attack: str, count: int, title: str) -> Figures:
    """During an attack, which leaves nothing behind."""
    name, opening = ATTACKS[attack]
    async with attacked(honest.gateway, name, count, opening):
        during = await measure(honest.app)
    report(title, honest.before, during)
    assert_unharmed(honest.before, during)
    await wait_until(lambda: descriptors(process_of(honest.gateway)) < honest.before.descriptors + 20, 20)
    return during


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bystander]:
    """A process that takes 384 connections."""
    async with contextlib.AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gateway, "prefix", ["/bin/sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"])
            serving = attackable(provider, backend, tmp_path_factory.mktemp("narrow"))
            bystander = await stack.enter_async_context(serving)
        yield bystander


@pytest.mark.timeout(240)
@pytest.mark.parametrize("attack", ["heads that drip", "bodies that drip"])
async def test_more_connections_than_the_process_takes(narrow: Bystander, attack: str) -> None:
    """Those that wait longest make room: the bystander is served, as long as the process takes any connection."""
    during = await figures(narrow, attack, 1000, f"1,000 connections at a process that takes 384: {attack}")
    assert during.descriptors < 500
