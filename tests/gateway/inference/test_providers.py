"""The choice among several providers by their order, their health and the operator's switches."""

import time
from collections.abc import AsyncIterator

import pytest

from gateway.errors import BackboneUnavailable
from gateway.inference.health import FAILURES, HEALTHY, HealthRecord
from gateway.inference.providers import Providers
from gateway.settings import ProviderSettings, Settings
from gateway.telemetry.metrics import Metrics
from tests.support.registries import process

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
