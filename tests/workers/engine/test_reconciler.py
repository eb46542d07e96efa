"""When the serving records are read: at once if a change is announced, and regularly otherwise."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

from gateway.deploys.serving import Records, Wanted
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.polling import wait_until
from workers.engine.names import follow_changes
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps


class Quiet:
    """Records that do not change."""

    reads = 0

    async def read_changes(self, _: dict[str, float]) -> AsyncIterator[list[Wanted]]:
        self.reads += 1
        for nothing in list[list[Wanted]]():
            yield nothing


async def find_no_app(_: str) -> None:
    """Finds no app."""


async def test_a_step_that_is_announced_is_read_at_once(store: Store) -> None:
    quiet, steps = Quiet(), cast("ReleaseSteps", SimpleNamespace(driver=None))
    reconciler = Reconciler(cast("Records", quiet), steps, find_no_app, 1.0, poll_seconds=1_000)

    async def announce() -> bool:
        """The first announcements may come before the subscription."""
        await Records(store).write("", Wanted("acc_1", f"app-{quiet.reads}", "live", "check", "dep_1"), "")
        await asyncio.sleep(0.05)
        return quiet.reads > 1

    async with (
        in_background(follow_changes(store, on_step=reconciler.look_soon)),
        in_background(reconciler.run()),
    ):
        await wait_until(lambda: quiet.reads == 1)
        await asyncio.sleep(0.1)
        assert quiet.reads == 1
        await wait_until(announce)
