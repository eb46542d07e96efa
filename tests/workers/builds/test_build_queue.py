"""Build slots are shared fairly between accounts."""

import asyncio
from collections import Counter

from workers.builds.build_queue import BuildQueue


class Builds:
    """Builds that end when a test ends them."""

    def __init__(self, shared: int = 2, spare: int = 1) -> None:
        self.slots = BuildQueue(shared, spare)
        self.started: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def queue(self, *deploys: str) -> None:
        """A deploy's account is the first letter of its id."""
        for deploy in deploys:
            self.ends[deploy] = asyncio.Event()
            self.running[deploy] = asyncio.create_task(self._build(deploy))
            await asyncio.sleep(0)
        await self.settle()

    async def _build(self, deploy: str) -> None:
        async with self.slots.acquire_slot(deploy[0], deploy):
            self.started.append(deploy)
            await self.ends[deploy].wait()

    async def end(self, deploy: str) -> None:
        self.ends[deploy].set()
        await self.running[deploy]
        await self.settle()

    async def leave(self, deploy: str) -> None:
        self.running[deploy].cancel()
        await asyncio.gather(self.running[deploy], return_exceptions=True)
        await self.settle()

    @staticmethod
    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def in_progress(self) -> set[str]:
        return {deploy for deploy in self.started if not self.running[deploy].done()}


async def test_an_account_with_many_long_builds_does_not_delay_another_account_s_first_build() -> None:
    builds = Builds()
    await builds.queue(*(f"a{n}" for n in range(20)))
    assert builds.started == ["a0", "a1"]
    await builds.queue("b0")
    assert builds.in_progress() == {"a0", "a1", "b0"}


async def test_an_account_has_one_build_at_a_time_while_others_wait() -> None:
    builds = Builds()
    await builds.queue("a0", "a1", "a2", "a3", "b0", "b1", "b2", "c0", "c1")
    while len(builds.started) < 9:
        await builds.end(min(builds.in_progress(), key=builds.started.index))
        per_account = Counter(deploy[0] for deploy in builds.in_progress())
        if len({deploy[0] for deploy in builds.slots.list_waiting()}) > 1 and len(builds.started) > 4:
            assert max(per_account.values()) == 1, builds.in_progress()
    assert builds.started[:4] == ["a0", "a1", "b0", "c0"]


async def test_accounts_rotate_and_each_account_s_deploys_keep_their_order() -> None:
    builds = Builds(shared=1, spare=0)
    await builds.queue("a0", "a1", "a2", "b0", "b1", "c0")
    predicted = builds.slots.list_waiting()
    assert predicted == ["b0", "c0", "a1", "b1", "a2"]
    for deploy in ["a0", *predicted[:-1]]:
        await builds.end(deploy)
    assert builds.started == ["a0", *predicted]


async def test_a_deploy_that_is_queued_again_keeps_its_position() -> None:
    builds = Builds(shared=1, spare=0)
    await builds.queue("b0", "a3", "a1", "a2")
    assert builds.slots.list_waiting() == ["a1", "a2", "a3"]


async def test_a_canceled_deploy_frees_its_slot() -> None:
    builds = Builds(shared=1, spare=0)
    await builds.queue("a0", "b0", "c0")
    await builds.leave("b0")  # waiting
    assert builds.slots.list_waiting() == ["c0"]
    await builds.leave("a0")  # building
    assert builds.in_progress() == {"c0"}
    await builds.end("c0")
    await builds.queue("d0")
    assert builds.in_progress() == {"d0"}


async def test_a_slot_granted_to_a_deploy_that_is_canceled_at_once_is_not_lost() -> None:
    builds = Builds(shared=1, spare=0)
    await builds.queue("a0", "b0", "c0")
    builds.ends["a0"].set()
    while "b0" in builds.slots.list_waiting():
        await asyncio.sleep(0)
    builds.running["b0"].cancel()  # its slot is granted, but it has not resumed
    await builds.settle()
    assert builds.in_progress() == {"c0"}
