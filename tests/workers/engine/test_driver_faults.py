"""The contract of a driver when a deploy fails, a worker or a builder dies, or what it needs is away."""

import asyncio
import contextlib
import errno
import itertools
import os
import time
from collections.abc import Collection

import pytest

from gateway.deploys.serving import Step
from gateway.keys import partition_tag, served_apps_key, serving_key
from tests.support.background import cancel
from tests.support.engines import ClusterEngine, HostEngine, nothing_happens
from tests.support.polling import wait_until
from tests.support.shops import AGAIN, APP, FIRST, SECOND, Shop
from tests.support.tcp_proxy import Proxy

BOTH_WAYS = ["side by side", "one after the other"]


# -- a release that fails ------------------------------------------------------------------------------------


# What is wrong with a release, and what its deploy is told. Every second one must not run beside the one before.
# `test_health.py` has other answers.
FAULTS = {
    "it has no archive": "no longer kept",
    "it ends": "status 3",
    "a disk is full": "the disk of the service is full; deploy again later",
    "it listens elsewhere": "It listens at 9999; listen at $PORT (8080).",
    "it is not healthy": "answered 404 to GET /healthz after 0 seconds; it must answer with 2xx or 3xx",
    "it answers 500": "answered 500 to GET / after 0 seconds",
    "its archive is damaged": "release",
    "it listens nowhere": "nothing listens at $PORT (8080)",
}
SLOW = ("it answers 500", "it is not healthy", "it listens nowhere")  # which take all the time to start


@pytest.mark.parametrize(("overlap", "faults"), [(True, [*FAULTS][::2]), (False, [*FAULTS][1::2])], ids=BOTH_WAYS)
async def test_a_release_that_fails_its_check_is_never_served(
    shop: Shop, overlap: bool, faults: Collection[str]
) -> None:
    async def fill_disk(call: str) -> None:
        if call == "place":
            shop.engine.after = nothing_happens
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await shop.open(overlap=overlap)
    for number, fault in enumerate(faults):
        shop.visitors.forget()
        health = "/healthz" if fault == "it is not healthy" else ""
        await shop.builder.make(deploy := f"dep_{number + 2}", overlap=overlap, health=health)
        if fault in SLOW and shop.engine.start_seconds != 0.4:
            shop.engine.start_seconds = 0.4
            await shop.restart()
        if fault == "it ends":
            shop.commands.ending.add(deploy)
        elif fault == "it listens elsewhere":
            shop.commands.elsewhere[deploy] = ["127.0.0.1:9999"]
        elif fault == "it has no archive":
            await shop.engine.lose_release(APP, deploy)
        elif fault == "a disk is full":
            shop.engine.after = fill_disk
        elif fault == "it answers 500":
            shop.commands.failing.add(deploy)
        elif fault == "it is not healthy":
            shop.commands.statuses[deploy, "/healthz"] = 404
        elif fault == "it listens nowhere":
            shop.commands.elsewhere[deploy] = []
        else:
            shop.engine.damage_release(APP, deploy)
            shop.engine.place_seconds = 0.4
            await shop.restart()
        began = time.monotonic()
        answer = await shop.builder.deploy(deploy)
        assert not answer.ok, fault
        assert FAULTS[fault] in answer.reason
        assert answer.service_fault == (fault in ("its archive is damaged", "a disk is full"))
        assert time.monotonic() - began < 10
        await shop.until_served(FIRST)


# What happens to a release during its canary, and why it fails.
BREAKS = {
    "ending": "the start command exited 1 time",
    "restarted": "the start command exited 1 time",
    "failing": "GET / returned 500",
    "unhealthy": "GET /healthz returned 404",
}


@pytest.mark.parametrize(
    ("overlap", "faults"), [(True, ["restarted", "unhealthy"]), (False, ["ending", "failing"])], ids=BOTH_WAYS
)
async def test_a_release_that_fails_its_canary_is_undone(shop: Shop, overlap: bool, faults: Collection[str]) -> None:
    """At once, and by the worker alone: its builder may be dead."""
    await shop.open(overlap=overlap)
    for number, fault in enumerate(faults):
        health = "/healthz" if fault == "unhealthy" else ""
        await shop.builder.make(deploy := f"dep_{number + 2}", overlap=overlap, health=health)
        await shop.go_on("check", deploy=deploy)
        canary = await shop.builder.write("canary", deploy)
        assert (await shop.builder.watch(canary)).ok
        await shop.visitors.until(deploy)
        if fault == "unhealthy":
            shop.commands.statuses[deploy, "/healthz"] = 404
        else:
            getattr(shop.commands, fault).add(deploy)
        answer = await shop.builder.until_answered(canary, lambda answer: answer and not answer.ok)
        assert answer.reason == BREAKS[fault]
        await shop.visitors.until(FIRST)
        shop.visitors.forget()
        await shop.go_on("undo", deploy=deploy)
        await shop.until_served(FIRST)


async def test_a_command_may_take_long_and_listen_at_other_ports_first(shop: Shop) -> None:
    """A worker that starts does not wait for it: other apps' deploys would fail meanwhile."""
    await shop.begin()
    shop.commands.elsewhere[SECOND] = []
    wanted = await shop.builder.write("check", SECOND)
    await wait_until(lambda: SECOND in shop.commands.running)
    async with asyncio.timeout(10):
        await shop.restart()
    shop.commands.elsewhere[SECOND] = ["127.0.0.1:9229"]
    await asyncio.sleep(0.1)
    del shop.commands.elsewhere[SECOND]
    answer = await shop.builder.until_answered(wanted)
    assert answer.ok, answer


# -- a worker or a builder that dies -------------------------------------------------------------------------


class Death:
    """A worker dies after a call to its driver: after the first one of a name, or after so many calls."""

    def __init__(self, shop: Shop, name: str = "", number: int = 0) -> None:
        self._shop, self._name, self._number = shop, name, number
        self.calls: list[str] = []
        self._died = asyncio.Event()
        shop.engine.after = self._note

    async def _note(self, name: str) -> None:
        if name == "tidy":
            return
        self.calls.append(name)
        if name == self._name or len(self.calls) == self._number:
            self._died.set()
            await asyncio.Event().wait()

    async def wait(self, *starting: asyncio.Task[None]) -> None:
        await asyncio.wait_for(self._died.wait(), 10)
        await cancel(*starting)
        if self._shop.engine.holds_requests:  # that would leave their connections open
            await self._shop.visitors.leave()
            await asyncio.sleep(0.02)
        await self._shop.engine.stop()
        if self._shop.engine.holds_requests:
            self._shop.visitors.come()


LAST_CALLS: dict[Step, str] = {"check": "until_answers", "canary": "visit", "live": "retire", "undo": "remove"}


async def die_in_step(shop: Shop, step: Step, deploy: str) -> None:
    """A worker dies after the step's last call, and the next ones after one call, two calls, and so on."""
    last = LAST_CALLS[step]
    death = Death(shop, last)
    wanted = await shop.builder.write(step, deploy)
    await death.wait()
    for number in itertools.count(1):
        death = Death(shop, number=number)
        await death.wait(asyncio.create_task(shop.engine.start()))
        if last in death.calls:
            break
    shop.engine.pause = 0.05
    await shop.engine.start()
    answer = await shop.builder.until_answered(wanted)
    assert answer.ok, (step, deploy, answer)
    shop.engine.pause = 0.0


async def test_workers_that_die_in_a_step_go_on(shop: Shop) -> None:
    """In each step of a deploy, and in the undoing of a check and of a canary.

    The releases must not run side by side, which is the harder way: there is nothing to go back to at once.
    """
    if isinstance(shop.engine, HostEngine):
        shop.engine.host.held_seconds = 60.0  # so many deaths take long
    await shop.begin(overlap=False)
    shop.visitors.waiting_may_be_refused = shop.engine.holds_requests
    for step in ("check", "canary", "live"):
        await die_in_step(shop, step, SECOND)
    await shop.until_served(FIRST, SECOND)
    before: dict[str, list[Step]] = {"dep_3": ["check"], "dep_4": ["check", "canary"]}
    for deploy, steps in before.items():
        await shop.builder.make(deploy, overlap=False)
        await shop.go_on(*steps, deploy=deploy)
        if "canary" in steps:
            await shop.visitors.until(deploy)
        await die_in_step(shop, "undo", deploy)
        await shop.until_only(SECOND)
    await shop.until_served(FIRST, SECOND, "dep_4", SECOND)


async def test_a_release_whose_builder_has_died_after_its_check_gives_way_again(shop: Shop) -> None:
    shop.engine.next_step_seconds = 0.2
    await shop.begin("check", overlap=False)
    await wait_until(lambda: FIRST in shop.commands.running)
    await shop.visitors.until(FIRST)
    assert set(shop.visitors.pages) == {FIRST}
    shop.require_one_at_a_time()


async def test_a_worker_that_starts_again_serves_what_the_records_say(shop: Shop) -> None:
    """It changes nothing for visitors, unless all is lost: then it serves the app as soon as its archive is whole.

    Another record cannot be read.
    """
    await shop.open()
    began = len(shop.commands.together)
    await shop.restart()
    await shop.until_served(FIRST)
    assert len(shop.commands.together) == began, "it runs on"
    await shop.engine.stop()
    shop.engine.resync_seconds = shop.engine.start_seconds = shop.engine.place_seconds = 0.3
    shop.engine.lose_everything()
    await shop.store.client.hset(serving_key(APP.account, "broken"), "live", "{")
    await shop.store.client.zadd(served_apps_key(partition_tag(APP.account)), {"broken": 1e14})
    repair = shop.engine.damage_release(APP, FIRST)
    shop.visitors.waiting_may_be_refused = True
    await wait_until(lambda: not shop.commands.running)
    await shop.engine.start()
    await asyncio.sleep(0.5)
    shop.visitors.forget()
    await wait_until(lambda: len(shop.visitors.answers) > AGAIN)
    assert shop.visitors.pages == []
    repair()
    await shop.until_only(FIRST)


# -- what it needs is away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["redis", "storage or API server"])
async def test_an_outage_delays_a_deploy_and_refuses_nobody(shop: Shop, proxy: Proxy, what: str) -> None:
    await shop.begin()
    for step in ("check", "canary"):
        with contextlib.ExitStack() as stack:
            if what == "redis":
                proxy.down = True
                stack.callback(setattr, proxy, "down", False)
                for link in [*proxy.links]:
                    link.cut()
            else:
                stack.enter_context(shop.engine.outage())
            wanted = await shop.builder.write(step, SECOND)
            await asyncio.sleep(0.5)
            if not (step == "canary" and what != "redis"):  # a host has the release by then
                assert await shop.builder.records.read_answer(wanted) is None
        answer = await shop.builder.until_answered(wanted, seconds=20)
        assert answer.ok
    await shop.go_on("live")
    await shop.until_served(FIRST, SECOND)


@pytest.mark.parametrize("kind", ["cluster"], indirect=True)
async def test_a_cluster_whose_writes_conflict_is_asked_again(shop: Shop) -> None:
    await shop.begin()
    assert isinstance(shop.engine, ClusterEngine)
    shop.engine.cluster.conflicts = 3
    await shop.go_on("check")
    shop.engine.cluster.conflicts = 3
    await shop.go_on("canary", "live")
    await shop.until_served(FIRST, SECOND)
    assert shop.engine.cluster.conflicts == 0
