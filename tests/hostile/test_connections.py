"""Thousands of connections that never become a request."""

import pytest

from tests.fakes import FakeAppBackend
from tests.gateway.conftest import Launch
from tests.hostile.bystander import assert_unharmed, attacked, measure, report, scaled
from tests.hostile.conftest import CONSTANTS, SETTINGS
from tests.support.accounts import App
from tests.support.gateway_process import Gateway
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
async def test_connections_that_are_held(honest: App, attack: str) -> None:
    name, opening = ATTACKS[attack]
    count = scaled(5000)
    before = await measure(honest)
    async with attacked(honest.gateway, name, count, opening):
        during = await measure(honest)
    report(f"{count:,} connections: {attack}", before, during)
    assert_unharmed(before, during)
    assert during.descriptors <= before.descriptors + count + 20
    assert during.memory - before.memory < 30 + count * 0.03


@pytest.mark.timeout(240)
@pytest.mark.parametrize("attack", ["heads that drip", "bodies that drip"])
async def test_more_connections_than_the_process_takes(
    launch: Launch, backend: FakeAppBackend, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait longest make room: the bystander is served, as long as the process takes any connection."""
    name, opening = ATTACKS[attack]
    monkeypatch.setattr(Gateway, "prefix", ["/bin/sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"])
    async with launch(CONSTANTS, **SETTINGS) as gateway:
        honest = await gateway.app(backend)
        before = await measure(honest)
        async with attacked(gateway, name, 1000, opening):
            during = await measure(honest)
    report(f"1,000 connections at a process that takes 384: {attack}", before, during)
    assert_unharmed(before, during)
    assert during.descriptors < 500
