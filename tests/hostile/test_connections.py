"""Thousands of connections that never complete a request do not delay the bystander."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.hostile.bystander import (
    Bystander,
    Figures,
    assert_unharmed,
    measure_app,
    report_row,
    run_attack,
    run_bystander,
    scale_attack,
)
from tests.support.polling import wait_until
from tests.support.processes import limit_descriptors
from tests.support.raw_http import request

pytestmark = pytest.mark.asyncio(loop_scope="session")

ATTACKS = {
    "heads that drip": ("drip", b"POST /capsule/x/ai HTTP/1.1\r\nhost: x\r\nx: "),
    "silence": ("drip", b""),
    "bodies that drip": ("drip", request("/register", b"", "Content-Length: 60000") + b"{"),
    "line breaks after an answer": ("breaks", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_connections_that_are_held(bystander: Bystander, attack: str) -> None:
    count = scale_attack(5000)
    during = await measure_attack(bystander, attack, count, f"{count:,} connections: {attack}")
    assert during.descriptors <= bystander.before.descriptors + count + 20
    assert during.memory - bystander.before.memory < 30 + count * 0.03


async def measure_attack(bystander: Bystander, attack: str, count: int, title: str) -> Figures:
    """Measures the bystander during an attack, and checks that the gateway closes the attacker's connections."""
    name, opening = ATTACKS[attack]
    async with run_attack(bystander.gateway, name, count, opening):
        during = await measure_app(bystander.app)
    report_row(title, bystander.before, during)
    assert_unharmed(bystander.before, during)
    await wait_until(lambda: bystander.gateway.descriptors < bystander.before.descriptors + 20, 20)
    return during


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow_bystander(
    provider: FakeProvider, backend: FakeAppBackend, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bystander]:
    """Runs a gateway that takes 384 connections."""
    folder = tmp_path_factory.mktemp("narrow")
    async with run_bystander(provider, backend, folder, prefix=limit_descriptors("-n 1024")) as bystander:
        yield bystander


@pytest.mark.parametrize("attack", ["heads that drip", "bodies that drip"])
async def test_more_connections_than_the_process_takes(narrow_bystander: Bystander, attack: str) -> None:
    """The connections that have waited longest are closed to make room, so the bystander is served."""
    during = await measure_attack(
        narrow_bystander, attack, 1000, f"1,000 connections at a process that takes 384: {attack}"
    )
    assert during.descriptors < 500
