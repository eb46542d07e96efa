"""An attack on the caps of an app and of its users, with several gateways and settlements that come late or never."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress

import msgspec
import pytest

from gateway.accounts.records import AppLimits
from gateway.errors import AppCapReached, ServiceError, SpendCapReached, UserCapReached
from gateway.inference.keys import app_spend_fields, spend_key, user_hash, user_spend_prefix
from tests.gateway.inference.admissions import CAP, AdmissionProcess, Books, admission_process, an_account, an_app
from workers.monitors.leases import settle_overdue

APPS, USERS = ("shop", "blog"), ("ana", "ben", "eve")
LEASE = 30  # milliseconds, of a gateway that forgets its reservations
ROUNDS = 8  # of 20 requests at once


class Attack:
    """The gateways under attack. `limits` are the account holder's, known to every gateway."""

    def __init__(self, books: Books, day: str) -> None:
        self.books, self.day = books, day
        self.limits = {app: AppLimits(dailyEuro="0.004", userDailyEuro="0.0015") for app in APPS}
        self.verdicts: Counter[str] = Counter()
        self.chance = random.Random(20_261_122)

    async def ask(self, at: AdmissionProcess) -> None:
        app, user = self.chance.choice(APPS), self.chance.choice(USERS)
        max_cost = self.chance.choice([0, 1, 40_000, 90_000, 333_333, 2_000_000])
        record = msgspec.structs.replace(an_app(app), limits=self.limits[app])
        try:
            admitted = await at.admission.admit(record, an_account(), user, max_cost)
        except (SpendCapReached, AppCapReached, UserCapReached) as error:
            self.verdicts[error.code] += 1
            return
        self.verdicts["ok"] += 1
        if admitted.reservation is None or at.admission._lease == LEASE:
            return  # forgotten: a monitors worker ends it
        await asyncio.sleep(self.chance.choice([0, 0, 0.01]))
        cost = self.chance.choice([0, 1, max_cost // 3, max_cost, max_cost * 2])
        settling = asyncio.create_task(at.settle(admitted.reservation, cost))
        if self.chance.random() < 0.2:
            await asyncio.sleep(0)
            settling.cancel()  # the gateway's queue repeats it
        with suppress(asyncio.CancelledError):
            await settling

    async def spends(self) -> dict[tuple[str, ...], int]:
        """Returns the sums of settled and reserved money, by app, and by app and user."""
        async with self.books.client.pipeline(transaction=True) as pipe:
            pipe.hgetall(spend_key("acc_one", self.day))
            payers = [(app, user) for app in APPS for user in USERS]
            for app, user in payers:
                pipe.hgetall(f"{user_spend_prefix('acc_one', app, user_hash(user))}:{self.day}")
            account, *users = await pipe.execute()
        by_app = {(app,): sum(int(account.get(name, 0)) for name in app_spend_fields(app)) for app in APPS}
        return {**by_app, **{payer: sum(map(int, spend.values())) for payer, spend in zip(payers, users, strict=True)}}

    def cap_of(self, payer: tuple[str, ...]) -> int:
        limits = self.limits[payer[0]]
        return (limits.cap if len(payer) == 1 else limits.user_cap) or 0

    async def watch(self) -> None:
        """Checks that no payer exceeds its cap, and that one above a lowered cap spends no more."""
        before = await self.spends()
        while True:
            after = await self.spends()
            for payer, spend in after.items():
                assert 0 <= spend <= max(self.cap_of(payer), before[payer]), payer
            before = after
            await asyncio.sleep(0.003)


async def test_caps_hold_whatever_gateways_do(redis_url: str, books: Books) -> None:
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(admission_process(redis_url, (10**6, 10**6))) for _ in range(3)]
        processes[2].admission._lease = LEASE
        attack = Attack(books, await books.today())

        async def run() -> None:
            watching = asyncio.create_task(attack.watch())
            for _ in range(ROUNDS):
                await asyncio.gather(*[attack.ask(attack.chance.choice(processes)) for _ in range(20)])
            await settle_overdue(processes[0].store)
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

        await run()
        assert {"ok", "APP_CAP_REACHED", "USER_CAP_REACHED"} <= attack.verdicts.keys()
        wide, narrow = (
            AppLimits(dailyEuro="0.02", userDailyEuro="0.008"),
            AppLimits(dailyEuro="0.005", userDailyEuro="0"),
        )
        for limits in (wide, narrow):
            attack.limits = dict.fromkeys(APPS, limits)
            attack.verdicts.clear()
            await run()
            assert bool(attack.verdicts["ok"]) == (limits is wide), attack.verdicts
        while not await books.closed():
            await asyncio.sleep(LEASE / 1000)
            await settle_overdue(processes[0].store)
        # The account's sum equals its apps' sums to the nano-euro, and an app's equals its users'.
        total, reserved = await books.spend()
        spends = await attack.spends()
        assert (total, reserved) == (sum(spends[app,] for app in APPS), 0)
        assert total <= CAP
        for app in APPS:
            assert spends[app,] == sum(spends[app, user] for user in USERS)


async def ask(
    at: AdmissionProcess, limits: AppLimits | None, max_cost: int, user: str = "ana", app: str = "shop"
) -> str:
    """Returns `ok` after an admission and a settlement at the maximum cost, else the code and the seconds to wait."""
    record = msgspec.structs.replace(an_app(app), limits=limits)
    try:
        admitted = await at.admission.admit(record, an_account(), user, max_cost)
    except ServiceError as error:
        return error.code
    if admitted.reservation is not None:
        await at.settle(admitted.reservation, max_cost)
    return "ok"


async def test_the_caps_are_checked_in_the_order_account_app_user(here: AdmissionProcess) -> None:
    limits = AppLimits(dailyEuro="0.00002", userDailyEuro="0.00001")
    assert await ask(here, limits, 10_000) == "ok"
    assert await ask(here, limits, 1) == "USER_CAP_REACHED"
    assert await ask(here, limits, 10_000, user="ben") == "ok"
    assert await ask(here, limits, 1) == "APP_CAP_REACHED"
    assert (
        await ask(here, limits, 0, user="eve") == "APP_CAP_REACHED"
    )  # a faulty request checks whether the cap is full
    assert await ask(here, None, CAP - 20_000, app="blog") == "ok"
    assert await ask(here, limits, 1) == "SPEND_CAP_REACHED"


async def test_a_new_cap_counts_the_app_since_midnight_and_its_users_from_now_on(
    here: AdmissionProcess,
) -> None:
    assert await ask(here, None, 30_000) == "ok"
    assert await ask(here, AppLimits(dailyEuro="0.00003"), 1) == "APP_CAP_REACHED"
    assert await ask(here, AppLimits(dailyEuro="0.000031", userDailyEuro="0.000001"), 1_000) == "ok"
    assert await ask(here, AppLimits(userDailyEuro="0.000001"), 1) == "USER_CAP_REACHED"
    assert await ask(here, None, 1) == "ok"


@pytest.mark.parametrize("max_cost", [0, 1])
async def test_a_cap_of_0_lets_nothing_pass(here: AdmissionProcess, books: Books, max_cost: int) -> None:
    assert await ask(here, AppLimits(dailyEuro="0"), max_cost) == "APP_CAP_REACHED"
    assert await ask(here, AppLimits(userDailyEuro="0"), max_cost) == "USER_CAP_REACHED"
    assert not await books.client.keys("*")


async def test_redis_holds_no_user_ids(here: AdmissionProcess, books: Books) -> None:
    record = msgspec.structs.replace(an_app(), limits=AppLimits(userDailyEuro="0.01"))
    admitted = await here.admission.admit(record, an_account(), "ana@example.com", 1000)
    assert admitted.reservation is not None
    stored = [*await books.client.keys("*"), *(await books.open()).values()]
    assert user_hash("ana@example.com") in " ".join(stored)
    assert "ana@example.com" not in " ".join(stored)
    assert admitted.reservation.record is not None
    assert admitted.reservation.record.user == user_hash("ana@example.com")
    await here.settle(admitted.reservation, 0)


async def test_retry_after_of_caps(here: AdmissionProcess) -> None:
    """It is the time until midnight, or two seconds if only running requests fill the cap."""
    limits = AppLimits(dailyEuro="0.00005", userDailyEuro="0.00001")
    record = msgspec.structs.replace(an_app(), limits=limits)
    running = (await here.admission.admit(record, an_account(), "ana", 10_000)).reservation
    assert running is not None
    with pytest.raises(UserCapReached) as refused:
        await here.admission.admit(record, an_account(), "ana", 1)
    assert (refused.value.retry_after or 0) <= 2
    assert "Running requests" in refused.value.message
    for max_cost, kind in ((10_001, UserCapReached), (50_001, AppCapReached)):
        with pytest.raises(kind) as refused:
            await here.admission.admit(record, an_account(), "ana", max_cost)
        assert 0 < (refused.value.retry_after or 0) <= 86_400
        assert "00:00 UTC" in refused.value.message
    await here.settle(running, 10_000)
    with pytest.raises(UserCapReached) as refused:
        await here.admission.admit(record, an_account(), "ana", 1)
    assert "00:00 UTC" in refused.value.message
