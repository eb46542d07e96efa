"""When the serving records are read, and which deploys are known to be in progress."""

import asyncio
from collections.abc import AsyncIterator, Set
from types import SimpleNamespace
from typing import Any, cast

from gateway.deploys.serving import Records, Wanted
from gateway.redis.client import Store
from tests.support.background import in_background
from tests.support.polling import wait_until
from workers.engine.names import follow_changes
from workers.engine.reconciler import Reconciler
from workers.engine.steps import ReleaseSteps


class Steps:
    """Records of which a test changes the steps."""

    reads = 0

    def __init__(self) -> None:
        self.changed = list[Wanted]()

    async def read_changes(self, _: dict[str, float]) -> AsyncIterator[list[Wanted]]:
        self.reads += 1
        yield self.changed


async def nothing(*_: object) -> Any:
    return None


def follow(records: Steps, driver: object = None, **seconds: float) -> Reconciler:
    names = SimpleNamespace(follow_some=nothing, gone=set())
    steps = cast("ReleaseSteps", SimpleNamespace(driver=driver, names=names))
    return Reconciler(cast("Records", records), steps, lambda _: asyncio.sleep(60), 1.0, **seconds)


async def test_a_step_that_is_announced_is_read_at_once(store: Store) -> None:
    """And regularly otherwise."""
    records = Steps()
    reconciler = follow(records, poll_seconds=1_000)

    async def announce() -> bool:
        """The first announcements may come before the subscription."""
        await Records(store).write("", Wanted("acc_1", f"app-{records.reads}", "live", "check", "dep_1"), "")
        await asyncio.sleep(0.05)
        return records.reads > 1

    async with (
        in_background(follow_changes(store, on_step=reconciler.look_soon)),
        in_background(reconciler.run()),
    ):
        await wait_until(lambda: records.reads == 1)
        await asyncio.sleep(0.1)
        assert records.reads == 1
        await wait_until(announce)


async def test_a_release_that_begins_while_others_are_tidied_is_kept() -> None:
    """Whoever tidies has the set of the deploys in progress, which changes meanwhile."""
    records, begun, over, kept = Steps(), asyncio.Event(), asyncio.Event(), list[set[str]]()

    async def tidy(_: Set[str], deploys: Set[str]) -> None:
        begun.set()
        await over.wait()
        kept.append({*deploys})

    driver = SimpleNamespace(tidy=tidy, note=lambda _: None)
    reconciler = follow(records, driver, poll_seconds=0.01, tidy_seconds=0.01)
    async with in_background(reconciler.run()):
        await begun.wait()
        records.changed = [Wanted("acc_1", "shop", "live", "check", "dep_1")]
        await wait_until(lambda: reconciler._steps)
        over.set()
        await wait_until(lambda: kept)
    await reconciler.aclose()
    assert kept[0] == {"dep_1"}
