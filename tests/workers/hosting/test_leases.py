"""Whether a host may run apps, and whether another one may take them over. The test sets all clocks."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.errors import BackboneUnavailable
from gateway.keys import LEASES_KEY
from gateway.redis.client import Store
from tests.support.redis_servers import free_port
from tests.support.stores import opened
from workers.hosting import leases
from workers.hosting.leases import LEASE_SECONDS, STEADY_SECONDS, TAKEOVER_SECONDS, Leases
from workers.sandbox import lease


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One clock for both hosts."""
    clock = Clock()
    monkeypatch.setattr(leases.time, "monotonic", clock)
    monkeypatch.setattr(lease, "now", clock)
    return clock


class Host(Leases):
    def __init__(self, store: Store, folder: Path, name: str) -> None:
        (folder / name / "web").mkdir(parents=True, exist_ok=True)
        super().__init__(store, folder / name, name, lambda: f"{name}:80")


@pytest_asyncio.fixture
async def pair(store: Store, tmp_path: Path, clock: Clock) -> AsyncIterator[tuple[Host, Host]]:
    pair = Host(store, tmp_path, "one"), Host(store, tmp_path, "two")
    for host in pair:
        host.begin_session()
        await host.renew()
    yield pair


async def watch(host: Host, clock: Clock, seconds: float) -> None:
    """Lets time pass, in which the host reads the leases every second."""
    for _ in range(int(seconds)):
        clock.now += 1
        await host.renew()


async def test_the_apps_end_before_another_host_takes_them_over(pair: tuple[Host, Host], clock: Clock) -> None:
    one, two = pair
    session = one.session
    assert session
    assert lease.is_held(one.path)
    await watch(two, clock, LEASE_SECONDS - 1)
    assert one.is_held()
    assert not two.has_ended("one", session)
    await watch(two, clock, 1)
    assert not one.is_held()
    assert one.session == ""
    assert not lease.is_held(one.path), "its keepers have noticed too"
    assert not two.has_ended("one", session), "some time is left for the killing"
    await watch(two, clock, TAKEOVER_SECONDS - LEASE_SECONDS + 1)
    assert two.has_ended("one", session)
    assert two.list_present() == ["two"]
    assert two.find_address("one", session) == ""


async def test_a_lease_that_ran_out_is_never_renewed(pair: tuple[Host, Host], clock: Clock) -> None:
    one, two = pair
    session = one.session
    clock.now += LEASE_SECONDS + 1
    await one.renew()
    assert not one.is_held()
    assert not lease.is_held(one.path)
    one.begin_session()
    await one.renew()
    assert one.session not in ("", session)
    await two.renew()
    assert two.has_ended("one", session), "the host itself has ended it"
    assert not two.has_ended("one", one.session)
    assert two.find_address("one", one.session) == "one:80"


async def test_a_host_that_was_away_judges_no_other(pair: tuple[Host, Host], clock: Clock) -> None:
    """All hosts may have lost Redis. Those whose apps it were go first."""
    one, two = pair
    session = one.session
    clock.now += TAKEOVER_SECONDS + 1
    await two.renew()
    assert not two.has_ended("one", session)
    assert not two.is_steady()
    await watch(two, clock, STEADY_SECONDS + 1)
    assert two.has_ended("one", session)


async def test_a_lease_that_redis_has_lost_is_given_time_too(
    pair: tuple[Host, Host], store: Store, clock: Clock
) -> None:
    one, two = pair
    await watch(two, clock, 5)
    await store.client.flushdb()
    await watch(two, clock, 5)
    assert not two.has_ended("one", one.session)
    assert not two.has_ended("unheard-of", "x")
    await watch(two, clock, TAKEOVER_SECONDS + 1)
    assert two.has_ended("unheard-of", "x")


async def test_the_clock_of_redis_does_not_matter(pair: tuple[Host, Host], store: Store, clock: Clock) -> None:
    """A renewal counts even if its time in Redis is the same, or an earlier one."""
    one, two = pair
    for number in range(int(2 * TAKEOVER_SECONDS)):
        clock.now += 1
        await one.renew()
        text = await store.client.hget(LEASES_KEY, "one")
        await store.client.hset(LEASES_KEY, "one", f"{time.time_ns() // 1_000_000 - number} {text.partition(' ')[2]}")
        await two.renew()
    assert not two.has_ended("one", one.session)


async def test_the_next_worker_continues_the_session(
    pair: tuple[Host, Host], store: Store, tmp_path: Path, clock: Clock
) -> None:
    one, two = pair
    session = one.session
    again = Host(store, tmp_path, "one")
    assert again.resume()
    assert again.session == session
    clock.now += LEASE_SECONDS - 1
    await again.renew()
    await two.renew()
    assert not two.has_ended("one", session)
    clock.now += LEASE_SECONDS
    assert not Host(store, tmp_path, "one").resume()


async def test_a_lease_means_nothing_after_a_restart_of_the_machine(
    pair: tuple[Host, Host], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pair
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(lease, "BOOT_ID", tmp_path / "boot")
    assert not lease.is_held(one.path)
    assert not Host(store, tmp_path, "one").resume()


async def test_a_damaged_or_missing_lease_is_not_held(tmp_path: Path) -> None:
    for text in ("", "{}", "[]", '{"boot": 1}', "\0"):
        (tmp_path / "lease").write_text(text)
        assert not lease.is_held(tmp_path / "lease")
    assert not lease.is_held(tmp_path / "other")


async def test_a_host_that_has_left_is_not_waited_for(pair: tuple[Host, Host]) -> None:
    one, two = pair
    await two.renew()
    assert two.list_present() == ["one", "two"]
    await one.end()
    await two.renew()
    assert two.list_present() == ["two"]
    assert not one.is_held()
    assert not one.path.exists()


async def test_without_redis_a_new_session_holds_nothing(tmp_path: Path, clock: Clock) -> None:
    async with opened(f"redis://127.0.0.1:{free_port()}/0") as store:
        host = Host(store, tmp_path, "one")
        host.begin_session()
        with pytest.raises(BackboneUnavailable):
            await host.renew()
        assert not host.is_held()
        assert not host.path.exists()


async def test_a_renewal_that_loses_the_cancellation_still_ends(
    pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As redis-py may on Python 3.11 (`end_if_canceled`)."""
    one, _ = pair
    begun = asyncio.Event()

    async def renew() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    monkeypatch.setattr(one, "renew", renew)
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 60)
    keeping = asyncio.create_task(one.keep())
    await begun.wait()
    keeping.cancel()
    done, _ = await asyncio.wait([keeping], timeout=5)
    keeping.cancel()
    assert done == {keeping}
