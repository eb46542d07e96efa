"""The status of inference, and the choice among providers.

The switch, the approval and the emergency-off file, with their effect on requests; then both without a gateway.
`test_health.py` has all signs that a provider gives.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.errors import BackboneUnavailable
from gateway.events.catalog import SAMPLES
from gateway.inference.availability import Availability
from gateway.inference.health import FAILURES, HEALTHY, Health, HealthRecord
from gateway.inference.providers import Providers
from gateway.settings import DEFAULT_PROVIDER, ProviderSettings, Settings
from gateway.telemetry.metrics import Metrics
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.gateway.conftest import Launch
from tests.support.accounts import App
from tests.support.gateway_process import OPERATOR, Gateway, gateway
from tests.support.inference_status import (
    OPERATIONAL,
    Usable,
    capabilities,
    status,
    status_becomes,
)
from tests.support.polling import wait_until
from tests.support.prices import PRICES
from tests.support.registries import process
from tests.support.responses import answered, refused, text_of

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


DISABLED = ("disabled", False)


async def answers(app: App, code: int) -> bool:
    response = await app.ask("x")
    if response.status_code == 503:
        refused(response, 503, "INFERENCE_DISABLED")
    return response.status_code == code


@session
async def test_gates_take_effect_in_every_process(
    launch: Launch, provider: FakeProvider, backend: FakeAppBackend
) -> None:
    settings = {"GATEWAY_INFERENCE": "off", "GATEWAY_PROCESSING_APPROVED": "false"}
    async with launch(**settings) as gw:
        assert await status(gw) == DISABLED
        for gates, expected in (
            ({"enabled": True}, DISABLED),
            ({"approved": True}, OPERATIONAL),
            ({"enabled": False}, DISABLED),
            ({"enabled": True, "approved": False}, DISABLED),
            ({"approved": True}, OPERATIONAL),
        ):
            response = await gw.switch(**gates)
            assert response.status_code == 200
            assert response.json()["managedInferenceStatus"] == expected[0]
            await status_becomes(gw, expected)
        for bad in ({"enabled": "yes"}, {"on": True}, []):
            refused(await gw.platform("PUT", "inference", bad), 400, "REQUEST_MALFORMED")
        app = await gw.app(backend)
        # Both are in Redis, so a new process with the old settings finds them.
        async with gateway(gw.redis.url, provider, gw.folder, **settings) as second:
            assert await status(second) == OPERATIONAL
            for enabled, code in ((True, 200), (False, 503)):
                await gw.switch(enabled=enabled)
                for where in (app, app.at(second)):
                    await wait_until(lambda where=where, code=code: answers(where, code), every=0.2)
        await off_comes_before_everything(gw, app, provider)
        await gw.switch(enabled=True)
        await wait_until(lambda: answers(app, 200), every=0.2)
        await file_acts_at_once(gw, app, provider)


async def off_comes_before_everything(gw: Gateway, app: App, provider: FakeProvider) -> None:
    nobody = App(app.account, "nobody-here", app.backend)
    evil = {"Origin": "https://evil.example"}
    seen = len(provider.exchanges)
    for asked, content, headers in (
        (app, b'{"prompt":"x"}', app.headers()),
        (app, b"{", {}),
        (app, b"x" * 200_000, app.headers(**evil)),
        (nobody, b'{"prompt":"x"}', {**evil, "Authorization": "Bearer x"}),
    ):
        for path in ("", "/chat/completions"):
            response = await asked.post(content=content, path=path, headers=headers)
            refused(response, 503, "INFERENCE_DISABLED")
            assert "Access-Control-Allow-Origin" not in response.headers
    models = await gw.http.get(app.path + "/models", headers=app.headers())
    refused(models, 503, "INFERENCE_DISABLED")
    # The app's own page can read the reason.
    response = await app.post({"prompt": "x"}, headers={"Origin": app.origin})
    refused(response, 503, "INFERENCE_DISABLED")
    assert response.headers["Access-Control-Allow-Origin"] == app.origin
    preflight = {"Origin": app.origin, "Access-Control-Request-Method": "POST"}
    response = await gw.http.options(app.path, headers=preflight)
    assert response.headers["Access-Control-Allow-Origin"] == app.origin
    for path, origin in ((app.path, evil["Origin"]), (nobody.path, app.origin)):
        response = await gw.http.options(path, headers={**preflight, "Origin": origin})
        refused(response, 503, "INFERENCE_DISABLED")
        assert "Access-Control-Allow-Origin" not in response.headers
    refused(await gw.http.options(app.path), 503, "INFERENCE_DISABLED")
    assert len(provider.exchanges) == seen


async def file_acts_at_once(gw: Gateway, app: App, provider: FakeProvider) -> None:
    """Checks that the file takes effect at once, even without Redis, which this kills at the end."""
    for _ in range(3):
        answered(await app.ask("x", token=app.token("file")))
        seen = len(provider.exchanges)
        gw.off_file.touch()
        refused(await app.ask("x"), 503, "INFERENCE_DISABLED")
        assert await status(gw) == DISABLED
        assert len(provider.exchanges) == seen
        gw.off_file.unlink()
    gw.off_file.touch()
    gw.redis.kill()
    refused(await app.ask("x"), 503, "INFERENCE_DISABLED")
    nobody = App(app.account, "never-seen", app.backend)
    response = await nobody.post({"prompt": "x"}, headers={"Origin": nobody.origin})
    refused(response, 503, "INFERENCE_DISABLED")


@session
async def test_the_file_is_checked_again_before_the_provider_and_cuts_no_stream(
    gw: Gateway, app: App, provider: FakeProvider
) -> None:
    async with FakeAppBackend() as slow:
        gate = asyncio.Event()
        end = [chunk("ten"), chunk(finish="stop"), chunk(usage=(1, 2)), DONE]
        try:
            async with app.stream(provider.plays(ROLE, chunk("Gu"), gate, *end)) as source:
                events = source.aiter_sse()
                heard = [await anext(events)]
                # A request that waits for its app's keys is refused just before it reaches the provider.
                waiting = await gw.app(slow)
                slow.gate.clear()
                late = provider.plays(tokens("x"))
                asking = asyncio.create_task(waiting.ask(late))
                await wait_until(lambda: slow.fetches)
                gw.off_file.touch()
                slow.gate.set()
                refused(await asking, 503, "INFERENCE_DISABLED")
                assert provider.asked(late) == []
                assert await waiting.account.settled() == 0
                await gw.switch(enabled=False)
                await wait_until(lambda: answers(app, 503))
                gate.set()
                heard += [e async for e in events]
        finally:
            gw.off_file.unlink(missing_ok=True)
            await gw.switch(enabled=True)
            await status_becomes(gw, OPERATIONAL)
        assert text_of(heard) == "Guten"
        assert heard[-1].event == "done"


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


async def test_a_late_answer_does_not_turn_a_provider_on_again(
    parts: tuple[Availability, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that began before an operator's change may be answered after the read that follows the change."""
    availability, _ = parts
    read, answered = availability._store.get, asyncio.Event()

    async def late(key: str) -> str | None:
        text = await read(key)
        await answered.wait()
        return text

    with monkeypatch.context() as slow:
        slow.setattr(availability._store, "get", late)
        before = asyncio.create_task(availability._reload_switch())
        await asyncio.sleep(0.2)
    await availability.change_switch(providers={DEFAULT_PROVIDER: False})
    answered.set()
    await before
    assert not availability.is_enabled(DEFAULT_PROVIDER)
    await availability.change_switch(providers={DEFAULT_PROVIDER: True})
    assert availability.is_enabled(DEFAULT_PROVIDER)


async def test_the_file_needs_no_redis(parts: tuple[Availability, Path]) -> None:
    """Not even in a process that has never read the switch."""
    availability, file = parts
    availability._doubt_switch()
    with pytest.raises(BackboneUnavailable):
        availability.status()
    file.parent.mkdir()
    file.touch()
    assert availability.status() == "disabled"


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
    assert not availability.status().available
    assert await availability.change_switch(approved=False) == "disabled"


# -- the choice ------------------------------------------------------------------------------------------------

MODEL, OTHER = "gpt-oss-120b", "qwen3.6-35b-a3b"
UP, DOWN, FULL = HEALTHY, HealthRecord(failures=FAILURES), HealthRecord(quota=True)
REFUSED, PAUSED = HealthRecord(refused=True), HealthRecord(passed_over_until=round((time.time() + 3_600) * 1000))


@pytest.fixture
async def providers(redis_url: str) -> AsyncIterator[Providers]:
    served = {"one": [MODEL, OTHER], "two": [MODEL], "three": [MODEL, OTHER]}
    named = [
        ProviderSettings(
            name=name,
            url=f"http://{name}.test/v1",
            region="fr-par",
            key="k",
            models=dict(zip(models, models, strict=True)),
        )
        for name, models in served.items()
    ]
    settings = Settings(inference=True, processing_approved=True, providers_file=tuple(named))
    async with process(redis_url) as registry:
        providers = Providers(settings, registry.store, registry, Metrics())
        await providers.availability.reload()
        yield providers


# The health of the providers, those that get requests in this order, and those that one request in a while tries.
CHOICES: dict[str, tuple[tuple[HealthRecord, ...], list[str], list[str]]] = {
    "all healthy": ((UP, UP, UP), ["one", "two", "three"], []),
    "the first is down": ((DOWN, UP, UP), ["two", "three"], ["one"]),
    "the last has no quota": ((UP, UP, FULL), ["one", "two"], ["three"]),
    "a refused credential": ((REFUSED, UP, UP), ["two", "three"], []),
    "a pause": ((PAUSED, UP, UP), ["two", "three"], []),
    "a pause, and no other one is healthy": ((PAUSED, DOWN, REFUSED), ["one", "two", "three"], ["two"]),
    "a pause comes before those that are down": ((DOWN, PAUSED, DOWN), ["two", "one", "three"], ["one", "three"]),
    "all down": ((DOWN, FULL, DOWN), ["one", "two", "three"], ["one"]),
}


@pytest.mark.parametrize("case", CHOICES)
async def test_the_choice(providers: Providers, case: str) -> None:
    records, candidates, on_trial = CHOICES[case]
    for provider, record in zip(providers.all, records, strict=True):
        provider.health._take(record)
    choice = providers.choose(MODEL)
    assert [each.name for each in choice.candidates] == candidates
    assert [each.name for each in choice.on_trial] == on_trial
    assert "two" not in [each.name for each in providers.choose(OTHER).candidates]
    await providers.availability.change_switch(providers={"one": False})
    choice = providers.choose(MODEL)
    assert "one" not in [each.name for each in (*choice.candidates, *choice.on_trial)]


async def test_no_provider_is_chosen_while_the_switch_is_in_doubt(providers: Providers) -> None:
    """An operator may just have turned inference off: each request is refused, not only the first one."""
    assert providers.choose(MODEL).candidates
    providers.availability._doubt_switch()
    for _ in range(2):
        with pytest.raises(BackboneUnavailable):
            providers.choose(MODEL)
    await providers.availability.reload()
    assert providers.choose(MODEL).candidates
