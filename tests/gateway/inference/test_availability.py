"""Each inference status, and its effect on requests with a single provider.

`test_health_signs.py` has all signs that a provider gives, and `test_availability_switches.py` covers the switches.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.events.catalog import SAMPLES
from gateway.inference.availability import Availability
from gateway.inference.health import Health
from gateway.inference.provider.errors import ProviderSignal
from gateway.keys import provider_key
from gateway.settings import DEFAULT_PROVIDER, Settings
from tests.support.gateway_process import OPERATOR, Gateway
from tests.support.inference_status import (
    Usable,
    capabilities,
)
from tests.support.polling import wait_until
from tests.support.prices import PRICES
from tests.support.redis_servers import RedisServer
from tests.support.registries import process
from tests.support.responses import refused
from tests.support.tcp_proxy import Proxy

session = pytest.mark.asyncio(loop_scope="session")


@session
async def test_the_capabilities_document(gw: Gateway) -> None:
    account = await gw.account()
    for key in (OPERATOR, account.key):
        document = await capabilities(gw, key)
        assert document["platform"] == {"features": {"managedInference": True}}
        assert document["models"] == list(PRICES)
        assert document["defaultModel"] == "gpt-oss-120b"
        assert document["eventTypes"] == list(SAMPLES)
        assert isinstance(document["managedInferenceStatus"], str)
        assert isinstance(document["limits"], dict)
    for headers in ({}, {"Authorization": "Bearer csk_nonsense"}, {"Authorization": f"Basic {OPERATOR}"}):
        refused(await gw.http.get("/capabilities", headers=headers), 401, "UNAUTHORIZED")


@pytest.mark.usefixtures("redis_url")
async def test_a_success_during_the_write_of_a_failure_counts(valkey: RedisServer) -> None:
    async with Proxy(valkey.port) as proxy, process(proxy.url) as registry:
        health = Health(DEFAULT_PROVIDER, registry, Usable())
        proxy.hold_requests = b'{"failures":1}'
        health.note_signal(ProviderSignal.FAILED)
        await wait_until(lambda: proxy.held)
        health.note_signal(ProviderSignal.COMPLETION)
        proxy.let_go()
        assert health._recorder is not None
        await asyncio.wait_for(health._recorder, 5)
        assert await registry.store.get(provider_key()) == "{}"


# -- without a gateway -----------------------------------------------------------------------------------------


@pytest.fixture
async def parts(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[Availability, Path]]:
    """The availability in a process with a provider and no key, and the path of the emergency-off file."""
    file = tmp_path / "run" / "inference.off"
    settings = Settings(inference=True, processing_approved=True, emergency_off_file=str(file))
    async with process(redis_url) as registry:
        availability = Availability(settings, registry, [Health(DEFAULT_PROVIDER, registry, WithoutKey())])
        await availability.reload()
        yield availability, file


class WithoutKey(Usable):
    def is_configured(self) -> bool:
        return False


async def test_without_a_credential(parts: tuple[Availability, Path]) -> None:
    availability, _ = parts
    assert availability.status() == "misconfigured"
    assert not availability.status().available
    assert await availability.change_switch(approved=False) == "disabled"


async def test_whatever_is_at_the_files_path_turns_inference_off(parts: tuple[Availability, Path]) -> None:
    availability, file = parts  # neither the folder nor the file exists
    assert availability.status() == "misconfigured"
    file.parent.symlink_to(file.parent)  # the path leads nowhere, so whether the file exists is unknown
    await wait_until(lambda: availability.status() == "disabled")
    file.parent.unlink()
    await wait_until(lambda: availability.status() == "misconfigured")
    file.parent.mkdir()
    for make, remove in ((file.mkdir, file.rmdir), (lambda: file.symlink_to("nothing"), file.unlink)):
        make()
        assert availability.status() == "disabled"
        remove()
        assert availability.status() == "misconfigured"
