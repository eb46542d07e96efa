"""While the provider is down, the gateway probes it at intervals."""

import pytest

from gateway.inference import health
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer
from tests.gateway.conftest import Launch
from tests.support.inference_status import status_becomes
from tests.support.polling import wait_until
from tests.support.responses import answered, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_refused_credential_recovers_with_the_next_probe(launch: Launch, backend: FakeAppBackend) -> None:
    """The test's interval is 1.1 seconds instead of 30, and its right to probe lasts 1 second instead of 20."""
    assert (health.PROBE_INTERVAL_SECONDS, health.PROBE_HOLD_SECONDS) == (30, 20)
    module = "gateway.inference.health"
    interval = {f"{module}.PROBE_INTERVAL_SECONDS": 1.1, f"{module}.PROBE_HOLD_SECONDS": 1}
    async with FakeProvider() as provider, launch(interval, GATEWAY_PROVIDER_URL=provider.url) as gw:
        app = await gw.app(backend)
        provider.models_status = 401
        refused(await app.ask(provider.plays(answer(401))), 502, "PROVIDER_ERROR")
        await status_becomes(gw, ("misconfigured", False))
        assert len(provider.probes) <= 2, "one to confirm the refusal, and one at the interval"
        await wait_until(lambda: len(provider.probes) == 2, 10)
        provider.models_status = 200
        await status_becomes(gw, ("operational", True), 10)
        assert len(provider.probes) <= 4
        assert provider.probes[2].at - provider.probes[1].at > 1, "at the next probe, not at once"
        answered(await app.ask("x"))
