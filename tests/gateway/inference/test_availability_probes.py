"""While inference is not operational, the gateway asks the provider now and then whether it has healed."""

import time

import pytest

from gateway.inference import availability
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer
from tests.gateway.conftest import Launch
from tests.gateway.inference.test_availability import becomes
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_refused_credential_heals(launch: Launch, backend: FakeAppBackend) -> None:
    """At the next probe, not at once. The test's interval is 10 seconds instead of 30."""
    assert availability.PROBE_INTERVAL == 30
    interval = {"gateway.inference.availability.PROBE_INTERVAL": 10}
    async with FakeProvider() as provider, launch(interval, GATEWAY_PROVIDER_URL=provider.url) as gw:
        app = await gw.app(backend)
        provider.models_status = 401
        refused(await app.ask(provider.plays(answer(401))), 502, "PROVIDER_ERROR")
        await becomes(gw, ("misconfigured", False))
        provider.models_status = 200
        began, seen = time.monotonic(), len(provider.probes)
        await becomes(gw, ("operational", True), 12)
        assert time.monotonic() - began > 3, "at the next probe, not at once"
        assert len(provider.probes) <= seen + 2
        answered(await app.ask("x"))
