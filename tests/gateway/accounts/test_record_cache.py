"""A process's copies of records: when they are used, and how soon each process sees a change."""

import asyncio
import random
from contextlib import suppress

import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.accounts.record_cache import RELOAD_SECONDS, RecordCache
from gateway.accounts.records import Domain, replace_domains
from gateway.accounts.registry import Registry
from gateway.errors import BackboneUnavailable
from gateway.inference.availability import Availability
from gateway.inference.health import Health
from gateway.keys import INFERENCE_KEY, account_key, app_key
from gateway.redis.scripts import compare_and_set
from gateway.settings import DEFAULT_PROVIDER, Settings
from tests.support.background import in_background
from tests.support.inference_status import Usable
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.registries import an_app, process, wait_for_change
from tests.support.stores import change_plan
from tests.support.tcp_proxy import Proxy


async def at_rest(registry: Registry) -> None:
    """Waits until every change made so far has been announced to this process: messages come in order."""
    reached = asyncio.Event()

    async def reach() -> None:
        reached.set()

    registry.cache.subscribe("fence", reach)
    await compare_and_set(registry.store, "fence", "")
    await asyncio.wait_for(reached.wait(), 5)


# -- copies ------------------------------------------------------------------------------------------------------


async def test_a_known_record_costs_no_round_trip(local: Registry, raw: redis.asyncio.Redis) -> None:
    account, _ = await local.create_account("One", "free")
    await local.put_app(an_app(account=account.id), None)
    await at_rest(local)
    assert await local.app("shop")
    assert await local.account(account.id)
    await raw.delete(app_key("shop"), account_key(account.id))  # unannounced
    assert await local.app("shop") == an_app(account=account.id)
    assert await local.account(account.id) == account


async def test_a_process_sees_its_own_change_at_once(local: Registry, proxy: Proxy, redis_url: str) -> None:
    """Even when its own message is late."""
    async with process(redis_url, proxy.url) as slow:
        account, _ = await slow.create_account("One", "free")
        first = an_app(account=account.id)
        await slow.put_app(first, None)
        assert await slow.app("shop") == first
        proxy.hold_answers = b"\r\n"
        second = replace(first, name="store")
        await slow.put_app(second, first)
        assert await slow.app("store") == second
        assert await slow.app("shop") is None
        assert (await change_plan(slow, account.id, "max")).plan == "max"
        assert (await slow.account(account.id)).plan == "max"  # type: ignore[union-attr]
        await slow.delete_app(second)
        assert await slow.app("store") is None
        proxy.let_go()


# -- staying current ---------------------------------------------------------------------------------------------


async def test_a_lost_subscription_drops_the_copies(local: Registry, proxy: Proxy, redis_url: str) -> None:
    async with process(redis_url, proxy.url) as peer:
        before = an_app()
        await local.put_app(before, None)
        assert await peer.app("shop") == before
        proxy.go_down()
        await wait_until(lambda: not peer.cache.is_current, timeout=1)
        for n in range(3):  # no copy is used while changes are not announced
            changed = replace_domains(before, [Domain(f"{n}.example")])
            await local.put_app(changed, before)
            assert await peer.app("shop") == changed
        proxy.down = False
        await wait_until(lambda: peer.cache.is_current, timeout=3)
        assert await peer.app("shop") == changed
        await local.put_app(before, changed)
        await wait_for_change(peer, before)


async def test_a_change_during_a_read_is_not_missed(local: Registry, proxy: Proxy, redis_url: str) -> None:
    """The record is changed and announced while the answer with the old one is on its way."""
    async with process(proxy.url, redis_url) as peer:
        before, changed = an_app(), an_app(customDomain="shop.example")
        await local.put_app(before, None)
        proxy.hold_answers = b"app:shop"
        reading = asyncio.create_task(peer.app("shop"))
        await wait_until(lambda: proxy.held)
        seen = peer.cache.changes
        await local.put_app(changed, before)
        await wait_until(lambda: peer.cache.changes > seen)
        proxy.let_go()
        assert await reading == before
        assert await peer.app("shop") == changed


async def test_no_old_record_stays(local: Registry, proxy: Proxy) -> None:
    """With readers, a writer and a bad network, every process returns the last record in the end."""
    chance = random.Random(0)
    async with process(proxy.url) as peer, process(proxy.url) as elsewhere:
        app = an_app()
        await local.put_app(app, None)
        stop = asyncio.Event()

        async def read(registry: Registry) -> None:
            while not stop.is_set():
                with suppress(BackboneUnavailable):
                    await registry.app("shop")
                await asyncio.sleep(chance.random() / 200)

        readers = [asyncio.create_task(read(each)) for each in (peer, elsewhere) for _ in range(4)]
        for n in range(60):
            await asyncio.sleep(chance.random() / 40)
            changed = replace_domains(app, [Domain(f"v{n}.example")])
            await local.put_app(changed, app)
            app = changed
            if n % 10 == 5:
                proxy.cut()
        for registry in (peer, elsewhere):
            await wait_until(lambda registry=registry: registry.cache.is_current, timeout=3)
            await wait_for_change(registry, app)
        stop.set()
        await asyncio.gather(*readers)
        for registry in (peer, elsewhere):
            assert await registry.app("shop") == app


async def test_a_switch_that_cannot_be_read_drops_no_copies(
    local: Registry, proxy: Proxy, redis_url: str, valkey: RedisServer
) -> None:
    """As when its node of a cluster is away. When a change of it was announced, it is unknown until it is read."""
    settings = Settings(inference=True, processing_approved=True, emergency_off_file="/nonexistent")
    async with process(proxy.url, redis_url, command_seconds=0.5) as peer:
        availability = Availability(settings, peer, [Health(DEFAULT_PROVIDER, peer, Usable())])
        with valkey.client() as client:
            client.client_kill_filter(_type="pubsub")
        await wait_until(lambda: availability._status is not None and peer.cache.is_current)
        await local.put_app(an_app(), None)
        await wait_for_change(peer, an_app())
        proxy.hold_requests = INFERENCE_KEY.encode()
        await compare_and_set(local.store, INFERENCE_KEY, '{"enabled":false}')
        await wait_until(lambda: availability._status is None)
        with pytest.raises(BackboneUnavailable):
            availability.status()
        assert peer.cache.is_current
        assert app_key("shop") in peer.cache._copies
        proxy.let_go()
        await wait_until(lambda: availability._status is not None)
        assert availability.status() == "disabled"


async def test_a_record_that_changes_while_it_is_read_is_read_again_at_once(local: Registry) -> None:
    cache, began, times = RecordCache(local.store), asyncio.Event(), list[float]()
    answered = asyncio.Event()

    async def reload() -> None:
        times.append(asyncio.get_running_loop().time())
        began.set()
        await answered.wait()

    cache.subscribe(INFERENCE_KEY, reload)
    async with in_background(cache.follow_changes()):
        await asyncio.wait_for(began.wait(), 5)
        cache._apply_change("", INFERENCE_KEY)
        released = asyncio.get_running_loop().time()
        answered.set()
        await wait_until(lambda: len(times) == 2)
    assert times[1] - released < RELOAD_SECONDS, "without the pause after a read that failed"


async def test_a_record_is_read_again_in_case_a_message_was_lost(local: Registry, raw: redis.asyncio.Redis) -> None:
    cache, read = RecordCache(local.store, reread_seconds=0.2), list[str | None]()

    async def reload() -> None:
        read.append(await local.store.get(INFERENCE_KEY))

    cache.subscribe(INFERENCE_KEY, reload)
    async with in_background(cache.follow_changes()):
        await wait_until(lambda: read)
        await raw.set(INFERENCE_KEY, "{}")  # unannounced
        await wait_until(lambda: read[-1:] == ["{}"])
    await raw.delete(INFERENCE_KEY)
