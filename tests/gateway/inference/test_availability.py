"""Each inference status, and its effect on requests with a single provider.

`test_health_signs.py` has all signs that a provider gives, and `test_availability_switches.py` covers the switches.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.events.catalog import SAMPLES
from gateway.inference.availability import Availability
from gateway.inference.health import Health
from gateway.inference.provider.errors import ProviderSignal
from gateway.keys import provider_key
from gateway.settings import DEFAULT_PROVIDER, Settings
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import answer
from tests.support.accounts import App
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import OPERATOR, Gateway, gateway_with_redis
from tests.support.inference_status import (
    OPERATIONAL,
    SOON,
    Usable,
    capabilities,
    forget_answers,
    status,
    status_becomes,
)
from tests.support.polling import wait_until
from tests.support.prices import PRICES
from tests.support.redis_servers import RedisServer
from tests.support.registries import process
from tests.support.responses import answered, refused
from tests.support.tcp_proxy import Proxy

session = pytest.mark.asyncio(loop_scope="session")


@module_fixture
async def moody() -> AsyncIterator[FakeProvider]:
    """A separate provider, because its health would disturb other tests."""
    async with FakeProvider() as provider:
        yield provider


@module_fixture
async def watcher(moody: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with gateway_with_redis(moody, tmp_path_factory.mktemp("watcher"), SOON) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def app(watcher: Gateway, backend: FakeAppBackend) -> App:
    app = await watcher.app(backend)
    answered(await app.ask("One success restores the status."))
    await status_becomes(watcher, OPERATIONAL)
    forget_answers(watcher)
    return app


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


@session
async def test_a_refusal_of_the_credential_needs_a_confirmation(app: App, moody: FakeProvider) -> None:
    for refusal in (401, 403):
        seen = len(moody.probes)
        prompt = moody.plays(answer(refusal, {"error": {"message": "who are you?"}}))
        refused(await app.ask(prompt), 502, "PROVIDER_ERROR")
        await wait_until(lambda seen=seen: len(moody.probes) == seen + 1)
        assert await status(app.gateway) == OPERATIONAL


@session
async def test_the_provider_is_unreachable_after_three_failures(app: App, moody: FakeProvider) -> None:
    bad = moody.plays(answer(500))
    for _ in range(2):
        for _ in range(2):
            assert (await app.ask(bad)).status_code == 502
        assert await status(app.gateway) == OPERATIONAL, "two failures are not enough"
        answered(await app.ask("x"))
    for _ in range(3):
        assert (await app.ask(bad)).status_code == 502
    await status_becomes(app.gateway, ("provider-unreachable", True))
    # Inference stays available, so requests are still sent, and one success restores the status.
    answered(await app.ask("x"))
    await status_becomes(app.gateway, OPERATIONAL)


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
