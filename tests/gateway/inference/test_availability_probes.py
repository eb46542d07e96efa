"""While inference is not operational, the gateway asks the provider now and then whether it has healed."""

import pytest

from gateway.inference import availability
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer
from tests.gateway.conftest import Launch
from tests.gateway.inference.test_availability import becomes
from tests.support.polling import wait_until
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_refused_credential_heals(launch: Launch, backend: FakeAppBackend) -> None:
    """At the next probe, not at once. The test's interval is 2 seconds instead of 30, and its lease 1 instead of 20."""
    assert (availability.PROBE_INTERVAL, availability.PROBE_LEASE) == (30, 20)
    module = "gateway.inference.availability"
    interval = {f"{module}.PROBE_INTERVAL": 2, f"{module}.PROBE_LEASE": 1}
    async with FakeProvider() as provider, launch(interval, GATEWAY_PROVIDER_URL=provider.url) as gw:
        app = await gw.app(backend)
        provider.models_status = 401
        refused(await app.ask(provider.plays(answer(401))), 502, "PROVIDER_ERROR")
        await becomes(gw, ("misconfigured", False))
        assert len(provider.probes) <= 2, "the one that confirmed the refusal, and the interval's"
        await wait_until(lambda: len(provider.probes) == 2, 10)
        provider.models_status = 200
        await becomes(gw, ("operational", True), 10)
        assert len(provider.probes) <= 4
        assert provider.probes[2].at - provider.probes[1].at > 1, "at the next probe, not at once"
        answered(await app.ask("x"))
