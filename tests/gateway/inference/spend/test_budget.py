"""Notices about caps, by admissions on a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import pytest

from gateway.accounts.records import AppLimits
from gateway.errors import ServiceError
from gateway.events.notices import NoticeChoices, Notices
from gateway.inference.spend.budget import REPORT_SECONDS, BudgetWatch
from gateway.keys import partition_tag, stream_key
from tests.gateway.inference.admissions import CAP, AdmissionProcess
from tests.support.background import cancel
from tests.support.polling import wait_until

ACCOUNT, SHOP = "acc_one", "shop"

always = pytest.mark.parametrize("report_seconds", [0], ids=["always"])


class Watching:
    """An admission process whose caps are watched, and the notices that it queues."""

    def __init__(self, process: AdmissionProcess, report_seconds: float) -> None:
        self.process, self.notices = process, Notices(process.store)
        self.watch = process.admission._budget = BudgetWatch(self.notices, report_seconds=report_seconds)

    async def spend(self, cost: int, limits: AppLimits | None = None) -> None:
        """Reserves and settles so much, if the caps allow it."""
        with suppress(ServiceError):
            await self.process.settle(await self.process.reserve(cost, limits=limits), cost)

    async def queued(self, count: int) -> list[tuple[str, int]]:
        """Waits for so many notices. Returns the app and the level of each."""
        key = stream_key(partition_tag(ACCOUNT), "mails")
        await wait_until(lambda: self.process.store.client.xlen(key), holds=lambda length: length == count)
        await wait_until(lambda: not self.watch._waiting)
        entries = await self.process.store.client.xrange(key)
        assert len(entries) == count
        return [(fields["app"], msgspec.json.decode(fields["data"])["level"]) for _, fields in entries]


@pytest.fixture
def report_seconds() -> float:
    return REPORT_SECONDS


@pytest.fixture
async def watching(process: AdmissionProcess, report_seconds: float) -> AsyncIterator[Watching]:
    watching = Watching(process, report_seconds)
    await watching.notices.choose(ACCOUNT, "ada@example.com", NoticeChoices(budget=True))
    reporting = asyncio.create_task(watching.watch.keep_reporting())
    yield watching
    await cancel(reporting)


async def test_the_accounts_cap(watching: Watching) -> None:
    await watching.spend(CAP * 79 // 100)
    assert await watching.queued(0) == []
    await watching.spend(CAP // 100)
    assert await watching.queued(1) == [("", 80)]
    await watching.spend(CAP // 10)
    assert await watching.queued(1) == [("", 80)]
    await watching.spend(CAP // 5)  # is refused
    await watching.spend(CAP // 5)
    assert await watching.queued(2) == [("", 80), ("", 100)]


async def test_what_is_reserved_counts(watching: Watching) -> None:
    reservation = await watching.process.reserve(CAP)
    assert await watching.queued(1) == [("", 100)]
    await watching.process.settle(reservation, CAP * 85 // 100)
    await watching.spend(1)
    assert await watching.queued(1) == [("", 100)], "no lower level follows"


async def test_an_apps_cap(watching: Watching) -> None:
    limits = AppLimits(dailyEuro="0.01")
    cap = limits.cap
    assert cap is not None
    await watching.spend(cap * 9 // 10, limits)
    assert await watching.queued(1) == [(SHOP, 80)]
    await watching.spend(cap, limits)  # is refused
    assert await watching.queued(2) == [(SHOP, 80), (SHOP, 100)]


@always
async def test_several_processes_and_a_restart_repeat_no_notice(watching: Watching) -> None:
    await watching.spend(CAP * 9 // 10)
    assert await watching.queued(1) == [("", 80)]
    watching.watch._reported.clear()
    for _ in range(3):
        await watching.spend(1)
    assert await watching.queued(1) == [("", 80)]


@always
async def test_who_turns_notices_on_later_gets_the_next(watching: Watching) -> None:
    await watching.notices.end(ACCOUNT, "ada@example.com")
    await watching.spend(CAP)
    assert await watching.queued(0) == []
    await watching.notices.choose(ACCOUNT, "ada@example.com", NoticeChoices(budget=True))
    await watching.spend(1)
    assert await watching.queued(1) == [("", 100)]
