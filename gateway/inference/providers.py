"""The model providers of a gateway, in the operator's order, and the choice among them."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gateway.accounts.registry import Registry
from gateway.inference.availability import Availability
from gateway.inference.concurrency.lease import Share, read_share
from gateway.inference.concurrency.permits import Permits
from gateway.inference.health import Health, ProviderStatus, keep_probing
from gateway.inference.provider.pool import Provider
from gateway.redis.client import Store
from gateway.settings import ProviderSettings, Settings
from gateway.telemetry.counters import read_provider_counts
from gateway.telemetry.metrics import Metrics


class ProviderPermits(msgspec.Struct):
    """The requests of all gateways at one provider, and those that wait for it."""

    limit: int  # in force; 0 for none
    used: int
    waiting: int


class ProviderState(msgspec.Struct):
    """One provider, for operators."""

    name: str
    region: str
    models: list[str]
    enabled: bool
    status: ProviderStatus
    passedOverUntil: str | None  # the end of the pause that it has asked for with `Retry-After`
    permits: ProviderPermits
    attempts: int  # requests that all gateways have sent to it on this UTC day
    failovers: int  # of them, those that failed and went to another provider


class ModelProvider:
    """One provider: its connections, its permits and its health."""

    def __init__(
        self, settings: Settings, chosen: ProviderSettings, store: Store, registry: Registry, metrics: Metrics
    ) -> None:
        self.settings, self.name = chosen, chosen.name
        self.pool = Provider(settings, chosen)
        self.permits = Permits(
            store,
            provider=chosen.name,
            limit=chosen.concurrency,
            rate=chosen.rate,
            observe_wait=metrics.provider_wait.labels(chosen.name).observe,
        )
        self.health = Health(chosen.name, registry, self.pool)
        self._gauges = metrics.permit_gauges(chosen.name)

    def show_permits(self) -> None:
        """Updates the gauges."""
        self._gauges.in_force.set(self.permits.in_force)
        self._gauges.used.set(self.permits.used)
        self._gauges.waiting.set(self.permits.waiting)


class Choice(NamedTuple):
    """The providers for a model, the preferred one first."""

    candidates: tuple[ModelProvider, ...]  # those that are healthy and not passed over or, if there is none, all
    on_trial: tuple[ModelProvider, ...] = ()  # the unhealthy ones of which a request may show that they are healthy


class Providers:
    def __init__(self, settings: Settings, store: Store, registry: Registry, metrics: Metrics) -> None:
        self.all = tuple(ModelProvider(settings, each, store, registry, metrics) for each in settings.providers)
        self.availability = Availability(settings, registry, [each.health for each in self.all])
        self.models, self._store = settings.models, store
        self._chosen: dict[str, Choice] = {}  # by model
        self._chosen_at = -1  # the number of changes of the availability

    def choose(self, model: str) -> Choice:
        """Returns the providers that may serve the model. Raises BackboneUnavailable."""
        changes = self.availability.changes
        if self._chosen_at != changes:
            self._chosen = {model: self._choose(model) for model in self.models}
            self._chosen_at = changes  # only now: while the switch is in doubt, each call raises
        return self._chosen[model]

    def _choose(self, model: str) -> Choice:
        usable = tuple(
            each
            for each in self.all
            if model in each.settings.models and each.pool.is_configured() and self.availability.is_enabled(each.name)
        )
        healthy = tuple(each for each in usable if each.health.is_usable)
        # Without one, those that have only asked for a pause come first.
        candidates = healthy or tuple(sorted(usable, key=lambda each: not each.health.is_up))
        # If none is up, every request tries the first one, and no other one comes before it.
        tried = usable if any(each.health.is_up for each in usable) else usable[:1]
        return Choice(candidates, tuple(each for each in tried if each.health.needs_trial))

    def find(self, name: str) -> ModelProvider | None:
        return next((each for each in self.all if each.name == name), None)

    async def read_shares(self) -> dict[str, Share]:
        """Returns each provider's share of permits and waiting requests. Raises BackboneUnavailable."""
        return {each.name: await read_share(self._store, each.name) for each in self.all}

    async def describe(self, shares: Mapping[str, Share]) -> list[ProviderState]:
        """Raises BackboneUnavailable, also while it is not known which providers are enabled."""
        counts = await read_provider_counts(self._store, shares)
        return [
            ProviderState(
                name=each.name,
                region=each.settings.region,
                models=list(each.settings.models),
                enabled=self.availability.is_enabled(each.name),
                status=each.health.status,
                passedOverUntil=each.health.passed_over_until,
                permits=ProviderPermits(
                    each.permits.in_force, shares[each.name].used, sum(shares[each.name].waiting.values())
                ),
                attempts=counts[each.name].attempts,
                failovers=counts[each.name].failovers,
            )
            for each in self.all
        ]

    def count_streams(self) -> int:
        """Returns the number of requests that the providers are answering."""
        return sum(len(each.pool.streams) for each in self.all)

    # -- for the life of the process -------------------------------------------------------------------------

    async def run(self) -> None:
        """Renews permits, times streams out, and probes what is down."""
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_probing([each.health for each in self.all]))
            for each in self.all:
                group.create_task(each.permits.run())
                group.create_task(each.pool.sweep())

    def interrupt(self) -> None:
        """Ends all streams and starts no new ones, because this process is about to stop."""
        for each in self.all:
            each.pool.interrupt()

    async def close(self) -> None:
        for each in self.all:
            await each.permits.close()
            each.pool.close()
