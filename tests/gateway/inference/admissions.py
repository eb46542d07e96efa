"""One gateway process's admission, and the records that it leaves in Redis."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio

from gateway.accounts.records import Account, App, AppLimits
from gateway.errors import ServiceError
from gateway.inference.spend.admission import Admission, Admitted, Reservation
from gateway.keys import partition_tag, spend_key
from gateway.redis.client import COMMAND_SECONDS, Store
from gateway.settings import RateLimits, Settings
from gateway.settings.prices import TARIFFS, Tariff
from gateway.telemetry.metrics import Metrics
from tests.lua.scripts import SECOND, day_of
from tests.support.background import in_background
from tests.support.stores import opened

CAP = Settings().daily_caps["free"]
EVALSHA = b"EVALSHA"
BRIEF = {"command_seconds": 0.5, "arrival": 0.5, "clock_error": 0.2, "retry": 0.05}  # seconds


class AdmissionProcess:
    """One process's admission, with its background task."""

    def __init__(
        self,
        store: Store,
        limits: tuple[int, int],
        tariffs: tuple[Tariff, ...] = TARIFFS,
        wait: float = 10,
        **options: Any,
    ) -> None:
        self.metrics, self.store = Metrics(), store
        settings = Settings(
            redis_url=store.url, rate_limits=RateLimits(*limits), prices_file=tariffs, provider_wait=wait
        )
        self.admission = Admission(settings, self.store, self.metrics, **options)
        self.settle = self.admission.settle

    async def admit(
        self,
        max_cost: int | str,
        user: str = "ana",
        *,
        app: str = "shop",
        account: str = "acc_one",
        limits: AppLimits | None = None,
    ) -> Admitted:
        """`max_cost` is nano-euro, or a model of which the request has one token."""
        record = App(id=app, name=app, account=account, createdAt="", limits=limits)
        owner = Account(id=account, name="One", plan="free", createdAt="")
        if isinstance(max_cost, str):
            return await self.admission.admit(record, owner, user, lambda tariff: tariff.prices[max_cost].input)
        return await self.admission.admit(record, owner, user, (lambda _: max_cost) if max_cost else None)

    async def reserve(self, max_cost: int | str, user: str = "ana", **of: Any) -> Reservation:
        reservation = (await self.admit(max_cost, user, **of)).reservation
        assert reservation is not None
        return reservation

    async def refusal(self, max_cost: int = 0, user: str = "ana", **of: Any) -> ServiceError | None:
        """Returns why a request is refused. A request that passes costs its maximum."""
        try:
            admitted = await self.admit(max_cost, user, **of)
        except ServiceError as error:
            return error
        if admitted.reservation is not None:
            await self.settle(admitted.reservation, max_cost)
        return None

    def retries(self) -> float:
        return self.counted("gateway_settlement_retries_total")

    def counted(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0


@asynccontextmanager
async def admission_process(
    url: str,
    limits: tuple[int, int] = (10_000, 10_000),
    *,
    replicas: int = 0,
    command_seconds: float = COMMAND_SECONDS,
    **options: Any,
) -> AsyncIterator[AdmissionProcess]:
    """Yields an admission process; `options` are `tariffs`, `wait` for a permit, and those of `Admission`."""
    async with opened(url, replicas, command_seconds=command_seconds) as store:
        running = AdmissionProcess(store, limits, **options)
        async with in_background(running.admission.repeat_settlements()):
            yield running


class Books:
    """The records in Redis, read without the gateway."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client = client

    async def today(self) -> str:
        return day_of((await self.client.time())[0] * SECOND)

    async def spend(self, owner: str = "acc_one", day: str = "") -> tuple[int, int]:
        """Returns the settled and the reserved nano-euro."""
        key = spend_key(owner, day or await self.today())
        settled, reserved = await self.client.hmget(key, ["settled", "reserved"])
        return int(settled or 0), int(reserved or 0)

    async def open(self, owner: str = "acc_one") -> dict[str, str]:
        return await self.client.hgetall(f"{partition_tag(owner)}:reservations")

    async def closed(self, owner: str = "acc_one") -> bool:
        leases = await self.client.zcard(f"{partition_tag(owner)}:leases")
        return not await self.open(owner) and not leases and (await self.spend(owner))[1] == 0

    async def passed(self, name: str = "shop", owner: str = "acc_one") -> int:
        return await self.client.llen(f"{partition_tag(owner)}:window:app:{name}")
