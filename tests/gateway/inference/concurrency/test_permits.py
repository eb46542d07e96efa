"""Several processes' permits: without contention, in turn, leaving and refused. Faults: `test_permits_faults.py`."""

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from gateway.errors import InferenceDisabled, ProviderQuotaExhausted
from gateway.inference.concurrency.lease_replies import read_share
from gateway.inference.concurrency.permits import Permit, Permits
from gateway.redis.client import Store
from tests.gateway.inference.permit_processes import Cluster, Provider, cluster, ready, take
from tests.support.polling import wait_until

__all__ = ["cluster"]


# -- without contention ----------------------------------------------------------------------------------------


async def test_an_uncontended_request_calls_nothing(cluster: Cluster) -> None:
    permits = cluster.start(bound=100)
    await ready(permits)
    called = cluster.calls(permits)
    began = time.monotonic()
    for _ in range(1000):
        held = [permits.take_now("acc"), permits.take_now("acc")]
        for permit in held:
            assert permit
            permits.release(permit)
        await asyncio.sleep(0)
    assert len(called) <= 1 + (time.monotonic() - began) / 2


async def test_a_process_gets_every_permit_that_is_free(cluster: Cluster) -> None:
    one, two = cluster.start(bound=10), cluster.start(bound=10)
    await ready(one)
    await ready(two)
    began = time.monotonic()
    held = await take(one, 10)
    assert time.monotonic() - began < 1
    assert (one.used, two.used, two._lease.spare) == (10, 0, 0)
    for permit in held:
        one.release(permit)
    assert len(await take(two, 10)) == 10


async def test_idle_permits_go_back(cluster: Cluster) -> None:
    permits = cluster.start(bound=100, renewal=0.1)
    for permit in await take(permits, 60):
        permits.release(permit)
    assert permits._lease.spare >= 60
    await wait_until(lambda: permits._lease.spare <= 4)


async def test_no_bound_needs_no_redis() -> None:
    permits = Permits(Store("redis://127.0.0.1:1/0"), bound=0, patience=0)
    run = asyncio.create_task(permits.run())
    held = [permits.take_now("acc") for _ in range(500)]
    await asyncio.sleep(0)
    assert permits.used == 500
    for permit in held:
        assert permit
        permits.release(permit)
    assert permits.used == 0
    run.cancel()
    await permits.close()


# -- contention ------------------------------------------------------------------------------------------------


async def test_the_bound_holds_and_permits_are_used(cluster: Cluster) -> None:
    """Eight processes that all have waiting requests, for two seconds."""
    provider, bound, seconds = Provider(), 40, 2.0
    processes = [cluster.start(bound=bound) for _ in range(8)]
    end = time.monotonic() + seconds

    async def ask(permits: Permits, account: str) -> None:
        while time.monotonic() < end:
            await provider.request(permits, account, random.uniform(0.1, 0.3))

    tasks = [asyncio.create_task(ask(p, f"acc{n}")) for p in processes for n in range(10)]
    await wait_until(lambda: provider.now == bound)
    began, busy = time.monotonic(), provider.busy
    await asyncio.sleep(end - 0.3 - time.monotonic())
    share = (provider.busy - busy) / (bound * (time.monotonic() - began))
    await asyncio.gather(*tasks)
    assert provider.most == bound
    assert share > 0.8  # 0.99 on a machine that does nothing else


async def test_a_freed_permit_is_used_at_once_in_another_process(cluster: Cluster) -> None:
    one, two = cluster.start(bound=5), cluster.start(bound=5)
    delays: list[float] = []
    held = await take(one, 5)
    for permit in held:
        waiting = asyncio.create_task(two.wait("other", "app", 1))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        one.release(permit)
        await waiting
        delays.append(time.monotonic() - began)
    assert sorted(delays)[len(delays) // 2] < 0.05
    assert max(delays) < 2


async def test_a_crowd_does_not_delay_the_others(cluster: Cluster) -> None:
    """An account fills its queue in eight processes; twenty accounts ask about once a second each."""
    provider, bound, seconds = Provider(), 40, 4.0
    processes = [cluster.start(bound=bound) for _ in range(8)]
    end = time.monotonic() + seconds
    served = 0  # of the crowd

    async def ask(permits: Permits, account: str) -> int:
        """How many of the crowd came first."""
        nonlocal served
        before = served
        permit = permits.take_now(account) or await permits.wait(account, "app", 1)
        passed = served - before
        served += account == "crowd"
        await provider.serve(permits, permit, random.uniform(0.5, 1))
        return passed

    async def crowd(permits: Permits) -> None:
        while time.monotonic() < end:
            try:
                await ask(permits, "crowd")
            except ProviderQuotaExhausted:
                await asyncio.sleep(0.05)

    async def visit(n: int) -> list[int]:
        await asyncio.sleep(1 + n / 20)
        passed = []
        while time.monotonic() < end:
            passed.append(await ask(processes[n % 8], f"acc{n}"))
            await asyncio.sleep(0.25)
        return passed

    many = [asyncio.create_task(crowd(p)) for p in processes for _ in range(15)]
    passed = [each for ones in await asyncio.gather(*(visit(n) for n in range(20))) for each in ones]
    await asyncio.gather(*many)
    assert len(passed) >= 40
    # In the order of arrival it would be the crowd's 60. How long it takes is for bench/fairness.py to show.
    assert sorted(passed)[len(passed) // 2] < 20
    assert provider.most == bound


async def test_a_weight_is_a_share(cluster: Cluster) -> None:
    provider, processes = Provider(), [cluster.start(bound=4) for _ in range(2)]
    served = {"light": 0, "heavy": 0}
    end = time.monotonic() + 2

    async def ask(permits: Permits, account: str, weight: float) -> None:
        while time.monotonic() < end:
            permit = permits.take_now(account) or await permits.wait(account, "app", weight)
            served[account] += 1
            await provider.serve(permits, permit, 0.02)

    tasks = [ask(p, a, w) for p in processes for a, w in (("light", 1), ("heavy", 3)) for _ in range(10)]
    await asyncio.gather(*tasks)
    assert served["heavy"] / served["light"] == pytest.approx(3, rel=0.3)


async def test_an_account_holds_no_more_than_its_share_while_others_wait(cluster: Cluster) -> None:
    """Turns alone share the requests: one whose requests last ten times as long held nearly all permits."""
    processes = [cluster.start(bound=10) for _ in range(2)]
    held = {"long": 0, "short": 0}
    most, end = 0, time.monotonic() + 4

    async def ask(permits: Permits, account: str, seconds: float) -> None:
        nonlocal most
        while time.monotonic() < end:
            permit = permits.take_now(account) or await permits.wait(account, "app", 1)
            held[account] += 1
            if end - 2 < time.monotonic() < end:
                most = max(most, held["long"])
            await asyncio.sleep(seconds)
            held[account] -= 1
            permits.release(permit)

    both = [("long", 0.5), ("short", 0.05)]
    await asyncio.gather(*(ask(p, account, seconds) for p in processes for account, seconds in both for _ in range(15)))
    assert 4 <= most <= 6


async def test_a_burst_in_front_of_free_permits_is_served(cluster: Cluster) -> None:
    permits = cluster.start(bound=1000)
    await wait_until(lambda: permits.in_force == 1000)
    await take(permits, 1)
    assert len(await asyncio.wait_for(asyncio.gather(*(take(permits, 1) for _ in range(500))), 5)) == 500


async def test_a_burst_beyond_the_free_permits_waits_within_its_limit(cluster: Cluster) -> None:
    permits = cluster.start(bound=100)
    await take(permits, 1)
    asked = [asyncio.create_task(permits.wait("acc", "app", 1)) for _ in range(500)]
    await wait_until(lambda: sum(task.done() for task in asked) == 440)
    await asyncio.sleep(0.2)
    done = [task for task in asked if task.done()]
    refused = [task for task in done if isinstance(task.exception(), ProviderQuotaExhausted)]
    assert (len(done), len(refused), permits.waiting) == (440, 341, 60)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_retry_after_knows_what_is_still_under_way(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said one second for a whole minute in which no permit came free."""
    permits = cluster.start(bound=20, patience=0.2)
    await take(permits, 20)
    monkeypatch.setattr("gateway.inference.concurrency.permits.monotonic", lambda: time.monotonic() + 45)
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        raise permits._exhausted("other", 1)
    assert refusal.value.retry_after is not None
    assert 45 <= refusal.value.retry_after <= 47


# -- leaving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["canceled", "left", "failed"])
async def test_a_request_that_leaves_loses_no_permit(cluster: Cluster, way: str) -> None:
    one, two = cluster.start(bound=3), cluster.start(bound=3)
    for _ in range(30):
        held = await take(one, 3)
        turns = [two.join("acc", "app", 1) for _ in range(4)]
        waiting = [asyncio.create_task(turn.permit()) for turn in turns]
        await asyncio.sleep(random.uniform(0, 0.003))
        for permit in held:
            one.release(permit)
        await asyncio.sleep(random.uniform(0, 0.003))
        if way == "failed":
            two.fail_waiting(InferenceDisabled())
        for task, turn in zip(waiting, turns, strict=True):
            if way == "canceled":
                task.cancel()
            elif way == "left":
                turn.leave(ConnectionError())
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(result, Permit):
                two.release(result)
        assert (one.used, two.used, two.waiting) == (0, 0, 0)
    assert len(await take(two, 3)) == 3


async def test_a_mass_of_canceled_requests_ends_well(cluster: Cluster) -> None:
    permits = cluster.start(bound=2)
    held = await take(permits, 2)
    waiting = [asyncio.create_task(permits.wait(f"acc{n}", "app", 1)) for n in range(5000)]
    await asyncio.sleep(0.1)
    for task in waiting:
        task.cancel()
    for permit in held:
        permits.release(permit)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (permits.used, permits.waiting) == (0, 0)
    assert len(await take(permits, 2)) == 2


async def test_one_app_or_all_are_ended_with_their_own_answer(cluster: Cluster) -> None:
    permits = cluster.start(bound=1)
    (held,) = await take(permits, 1)
    gone, stays = (asyncio.create_task(permits.wait("acc", app, 1)) for app in ("gone", "stays"))
    await asyncio.sleep(0.02)
    permits.fail_waiting(InferenceDisabled(), app="gone")
    with pytest.raises(InferenceDisabled):
        await gone
    permits.release(held)
    assert await stays


# -- refusals --------------------------------------------------------------------------------------------------


async def test_a_request_waits_for_so_long_and_no_longer(cluster: Cluster) -> None:
    permits = cluster.start(bound=1, patience=0.2)
    await take(permits, 1)
    began = time.monotonic()
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        await permits.wait("acc", "app", 1)
    assert 0.2 <= time.monotonic() - began < 1.5
    assert refusal.value.retry_after == 2  # nobody is ahead; a request lasts two seconds as far as is known


async def test_one_more_than_sixty_is_refused_with_a_true_wait(cluster: Cluster) -> None:
    permits = cluster.start(bound=4, patience=60)
    provider, duration = Provider(), 0.05
    for _ in range(50):
        await asyncio.gather(*(provider.request(permits, "acc", duration) for _ in range(4)))
    crowd = [asyncio.create_task(provider.request(permits, "acc", duration)) for _ in range(64)]
    others = [asyncio.create_task(provider.request(permits, "other", duration)) for _ in range(60)]
    await wait_until(lambda: permits.waiting == 120)
    began = time.monotonic()
    with pytest.raises(ProviderQuotaExhausted) as refusal:
        permits.join("acc", "app", 1)
    await asyncio.gather(*crowd, *others)
    assert refusal.value.retry_after
    assert refusal.value.retry_after - 1 <= time.monotonic() - began + 0.3 <= refusal.value.retry_after + 0.5


async def test_sixty_of_an_account_wait_over_all_processes(cluster: Cluster) -> None:
    processes = [cluster.start(bound=2, patience=60) for _ in range(3)]
    held = await take(processes[0], 2)
    waiting = [asyncio.create_task(p.wait("acc", "app", 1)) for p in processes for _ in range(30)]
    others = [asyncio.create_task(p.wait("other", "app", 1)) for p in processes]
    await wait_until(lambda: sum(task.done() for task in waiting) == 30, timeout=5)
    refused = [task.exception() for task in waiting if task.done()]
    assert all(isinstance(error, ProviderQuotaExhausted) for error in refused)
    await asyncio.sleep(0.5)
    assert sum(task.done() for task in waiting) == 30
    assert not any(task.done() for task in others)
    for task in [*waiting, *others]:
        task.cancel()
    await asyncio.gather(*waiting, *others, return_exceptions=True)
    for permit in held:
        processes[0].release(permit)


async def test_where_nobody_waits_a_request_still_asks(cluster: Cluster) -> None:
    one, two = cluster.start(bound=4, patience=0), cluster.start(bound=4, patience=0)
    await ready(one)
    held = await take(two, 4)
    with pytest.raises(ProviderQuotaExhausted):
        await take(one, 1)
    two.release(held[0])
    assert await take(one, 1)


async def test_a_429_halves_the_bound_and_it_grows_back(cluster: Cluster) -> None:
    one, two = cluster.start(bound=4), cluster.start(bound=4)
    held = await take(one, 4)
    waiting = asyncio.create_task(two.wait("acc", "app", 1))
    one.halve_bound()
    await wait_until(lambda: one.in_force == 2)
    one.halve_bound()
    one.release(held[0])
    one.release(held[1])
    await asyncio.sleep(0.1)
    assert one.in_force == 2
    assert not waiting.done()
    began = time.monotonic()
    await waiting  # the bound is 3 again, and nobody else calls: the waiting process knows when to ask
    assert 0.6 < time.monotonic() - began < 2


async def test_the_share_that_operators_see(cluster: Cluster) -> None:
    one, two = cluster.start(bound=2), cluster.start(bound=2)
    await take(one, 2)
    waiting = [asyncio.create_task(p.wait(a, "app", 1)) for p in (one, two) for a in ("x", "y")]
    store = cluster.running[one][1]

    async def share() -> Callable[[], bool] | bool:
        seen = await read_share(store)
        return (seen.held, seen.used, seen.waiting) == (2, 2, {"x": 2, "y": 2})

    await wait_until(share)
    for task in waiting:
        task.cancel()
