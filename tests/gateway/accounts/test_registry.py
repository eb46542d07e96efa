"""Accounts and apps, and how soon every process feels that one of them changed."""

import asyncio
import random
import time
from contextlib import suppress

import pytest
import redis.asyncio
from msgspec.structs import replace

from gateway.accounts import registry as registry_module
from gateway.accounts.keys import account_key, app_key, domain_key
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable, NotFound, RequestMalformed
from gateway.inference.availability import Availability
from gateway.inference.keys import INFERENCE_KEY
from gateway.redis import client as store_module
from gateway.redis.client import Store
from gateway.redis.scripts import compare_and_set
from gateway.settings import Settings
from tests.gateway.accounts.conftest import KEY, process
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy


def an_app(name: str = "shop", account: str = "acc_one", **fields: object) -> App:
    return App(**{"id": name, "name": name, "account": account, "createdAt": "", **fields})  # type: ignore[arg-type]


async def at_rest(registry: Registry) -> None:
    """Every change made so far has been announced to this process: messages come in order."""
    reached = asyncio.Event()

    async def reach() -> None:
        reached.set()

    registry.subscribe("fence", reach)
    await compare_and_set(registry.store, "fence", "")
    await asyncio.wait_for(reached.wait(), 5)


async def felt(registry: Registry, changed: App) -> None:
    """Within a second, by whoever asks for it."""

    async def as_changed() -> bool:
        with suppress(BackboneUnavailable):  # a connection of the pool that was cut
            return await registry.app(changed.name) == changed
        return False

    await wait_until(as_changed, timeout=1)


# -- copies ------------------------------------------------------------------------------------------------------


async def test_a_known_record_costs_no_round_trip(here: Registry, raw: redis.asyncio.Redis) -> None:
    account, _ = await here.create_account("One", "free")
    await here.put_app(an_app(account=account.id), None)
    await at_rest(here)
    assert await here.app("shop")
    assert await here.account(account.id)
    await raw.delete(app_key("shop"), account_key(account.id))  # unannounced
    assert await here.app("shop") == an_app(account=account.id)
    assert await here.account(account.id) == account


async def test_a_change_is_felt_elsewhere(here: Registry, there: Registry) -> None:
    account, _ = await here.create_account("One", "free")
    before = an_app(account=account.id)
    await here.put_app(before, None)
    assert await there.app("shop") == before
    assert await there.account(account.id) == account

    changed = replace(before, customDomain="shop.example", customDomainVerified=True)
    await here.put_app(changed, before)
    await felt(there, changed)
    larger = await here.change_plan(account.id, "max")

    async def felt_plan() -> bool:
        return await there.account(account.id) == larger

    await wait_until(felt_plan, timeout=1)
    await here.delete_app(changed)

    async def gone() -> bool:
        return await there.app("shop") is None

    await wait_until(gone, timeout=1)


async def test_who_changes_something_sees_it_at_once(here: Registry, proxy: Proxy, redis_url: str) -> None:
    """Even when its own message about it is late."""
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
        assert (await slow.change_plan(account.id, "max")).plan == "max"
        assert (await slow.account(account.id)).plan == "max"  # type: ignore[union-attr]
        await slow.delete_app(second)
        assert await slow.app("store") is None
        proxy.let_go()


async def test_copies_are_bounded(here: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "COPIES", 3)
    for n in range(6):
        await here.put_app(an_app(f"app-{n}"), None)
    for _ in range(2):
        for n in range(6):
            assert (await here.app(f"app-{n}")) == an_app(f"app-{n}")
            assert len(here._copies) <= 3


async def test_names_that_do_not_exist_push_nobody_out(here: Registry) -> None:
    for n in range(50):
        assert await here.app(f"no-{n}") is None
    assert not here._copies


@pytest.mark.parametrize("name", ["", "..", "Shop", "shop:x", "sh--op", "-shop", "shöp", "a" * 64, "*", "shop\n"])
async def test_what_is_no_name_is_never_looked_up(redis_url: str, name: str) -> None:
    store = Store("redis://127.0.0.1:1/0")
    assert await Registry(store, Vault(KEY)).find(name) is None
    await store.close()


# -- staying current ---------------------------------------------------------------------------------------------


async def test_a_lost_subscription_drops_the_copies(here: Registry, proxy: Proxy, redis_url: str) -> None:
    async with process(redis_url, proxy.url) as there:
        before = an_app()
        await here.put_app(before, None)
        assert await there.app("shop") == before
        proxy.go_down()
        await wait_until(lambda: not there.live, timeout=1)
        for n in range(3):  # nothing is kept while nobody would tell of its change
            changed = replace(before, customDomain=f"{n}.example")
            await here.put_app(changed, before)
            assert await there.app("shop") == changed
        proxy.down = False
        await wait_until(lambda: there.live, timeout=3)
        assert await there.app("shop") == changed
        await here.put_app(before, changed)
        await felt(there, before)


async def test_a_half_open_subscription_is_noticed(here: Registry, proxy: Proxy, redis_url: str) -> None:
    """The connection stands and says nothing: a change is felt within a second all the same."""
    async with process(redis_url, proxy.url) as there:
        before, changed = an_app(), an_app(customDomain="shop.example")
        await here.put_app(before, None)
        assert await there.app("shop") == before
        proxy.swallowing = True
        await here.put_app(changed, before)
        began = time.monotonic()
        await felt(there, changed)
        assert time.monotonic() - began < 1.1
        proxy.swallowing = False
        await wait_until(lambda: there.live, timeout=6)
        assert await there.app("shop") == changed


async def test_a_quiet_subscription_is_not_taken_for_a_lost_one(here: Registry) -> None:
    await here.put_app(an_app(), None)
    await at_rest(here)
    await here.app("shop")
    copies = dict(here._copies)
    await asyncio.sleep(1.5)  # several heartbeats; no condition tells of a thing that must not happen
    assert here.live
    assert here._copies == copies


async def test_nothing_is_told_from_copies_while_redis_is_away(here: Registry, proxy: Proxy) -> None:
    """Rather refused than answered from a record that may have changed."""
    async with process(proxy.url) as there:
        await here.put_app(an_app(), None)
        assert await there.app("shop")
        proxy.go_down()
        await wait_until(lambda: not there.live, timeout=1)
        with pytest.raises(BackboneUnavailable):
            await there.app("shop")
        proxy.down = False
        await wait_until(lambda: there.live, timeout=3)
        assert await there.app("shop") == an_app()


async def test_a_frozen_redis_is_noticed(valkey: RedisServer, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store_module, registry_module):
        monkeypatch.setattr(module, "ATTEMPT", 0.5)
    async with process(redis_url) as registry:
        await registry.put_app(an_app(), None)
        assert await registry.app("shop")
        valkey.freeze()
        try:
            await wait_until(lambda: not registry.live, timeout=2)
            with pytest.raises(BackboneUnavailable):
                await registry.app("shop")
        finally:
            valkey.thaw()
        await wait_until(lambda: registry.live, timeout=5)
        assert await registry.app("shop") == an_app()


async def test_a_change_during_the_reading_is_not_missed(here: Registry, proxy: Proxy, redis_url: str) -> None:
    """The old record is read, then changed and announced, and only then does the old one arrive."""
    async with process(proxy.url, redis_url) as there:
        before, changed = an_app(), an_app(customDomain="shop.example")
        await here.put_app(before, None)
        proxy.hold_answers = b"app:shop"
        reading = asyncio.create_task(there.app("shop"))
        await wait_until(lambda: proxy.held)
        seen = there._changes
        await here.put_app(changed, before)
        await wait_until(lambda: there._changes > seen)
        proxy.let_go()
        assert await reading == before
        assert await there.app("shop") == changed


async def test_a_change_before_the_subscription_is_not_missed(
    here: Registry, proxy: Proxy, valkey: RedisServer
) -> None:
    """The old record is read and changed before this process listens, and arrives after it does."""
    async with Proxy(valkey.port) as listening, process(proxy.url, listening.url) as there:
        before, changed = an_app(), an_app(customDomain="shop.example")
        await here.put_app(before, None)
        listening.go_down()
        await wait_until(lambda: not there.live, timeout=1)
        proxy.hold_answers = b"app:shop"
        reading = asyncio.create_task(there.app("shop"))
        await wait_until(lambda: proxy.held)
        await here.put_app(changed, before)
        listening.down = False
        await wait_until(lambda: there.live, timeout=3)
        proxy.let_go()
        await reading
        assert await there.app("shop") == changed


@pytest.mark.parametrize("seed", range(2))
async def test_no_old_record_stays(here: Registry, proxy: Proxy, seed: int) -> None:
    """Readers, a writer and a bad network: in the end every process tells the last record."""
    chance = random.Random(seed)
    async with process(proxy.url) as there, process(proxy.url) as elsewhere:
        app = an_app()
        await here.put_app(app, None)
        stop = asyncio.Event()

        async def read(registry: Registry) -> None:
            while not stop.is_set():
                with suppress(BackboneUnavailable):
                    await registry.app("shop")
                await asyncio.sleep(chance.random() / 200)

        readers = [asyncio.create_task(read(each)) for each in (there, elsewhere) for _ in range(4)]
        for n in range(60):
            await asyncio.sleep(chance.random() / 40)
            changed = replace(app, customDomain=f"v{n}.example")
            await here.put_app(changed, app)
            app = changed
            if n % 10 == 5:
                proxy.cut()
        for registry in (there, elsewhere):
            await wait_until(lambda registry=registry: registry.live, timeout=3)
            await felt(registry, app)
        stop.set()
        await asyncio.gather(*readers)
        for registry in (there, elsewhere):
            assert await registry.app("shop") == app


async def test_subscribers_are_told_of_changes_and_of_every_new_beginning(here: Registry, proxy: Proxy) -> None:
    async with process(proxy.url) as there:
        told: list[str | None] = []

        async def reload() -> None:
            told.append(await there.store.get("inference"))

        there.subscribe("inference", reload)
        await compare_and_set(here.store, "inference", "1")
        await wait_until(lambda: told == ["1"], timeout=1)
        proxy.go_down()
        await compare_and_set(here.store, "inference", "2")
        proxy.down = False
        await wait_until(lambda: told == ["1", "2"], timeout=3)


async def test_a_switch_that_cannot_be_read_costs_no_copies(
    here: Registry, proxy: Proxy, redis_url: str, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its node of a cluster is away. What is known of it applies, unless a change was announced."""
    monkeypatch.setattr(store_module, "ATTEMPT", 0.5)
    settings = Settings(inference=True, processing_approved=True, emergency_off_file="/nonexistent")
    async with process(proxy.url, redis_url) as there:
        availability = Availability(settings, there, lambda: True, _no_probe)
        with pytest.raises(BackboneUnavailable):
            availability.status()
        with valkey.client() as client:
            client.client_kill_filter(_type="pubsub")
        await wait_until(lambda: availability._status is not None and there.live)
        await here.put_app(an_app(), None)
        await felt(there, an_app())

        proxy.hold_requests = INFERENCE_KEY.encode()
        with valkey.client() as client:
            client.client_kill_filter(_type="pubsub")
        await wait_until(lambda: proxy.held and there.live)
        assert await there.app("shop") == an_app()
        await asyncio.sleep(0.7)  # longer than the attempt to read it
        assert there.live
        assert availability.status() == "operational"
        assert app_key("shop") in there._copies

        await compare_and_set(here.store, INFERENCE_KEY, '{"enabled":false}')

        def is_in_doubt() -> bool:
            return availability._status is None

        await wait_until(is_in_doubt)
        with pytest.raises(BackboneUnavailable):
            availability.status()
        assert there.live
        proxy.let_go()
        await wait_until(lambda: not is_in_doubt())
        assert availability.status() == "disabled"


async def _no_probe() -> None:
    raise AssertionError("nothing is wrong with the provider")


async def test_a_message_that_a_cluster_lost(
    redis_url: str, raw: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "REREAD", 0.2)
    async with process(redis_url) as there:
        read: list[str | None] = []

        async def reload() -> None:
            read.append(await there.store.get(INFERENCE_KEY))

        there.subscribe(INFERENCE_KEY, reload)
        await raw.set(INFERENCE_KEY, "1")  # and nobody is told
        await wait_until(lambda: read[-1:] == ["1"])


# -- accounts and apps -------------------------------------------------------------------------------------------


async def test_an_api_key_is_kept_only_as_its_hash(here: Registry, raw: redis.asyncio.Redis) -> None:
    account, api_key = await here.create_account("One", "starter")
    assert api_key.startswith("csk_")
    key = await here.api_keys.identify(api_key)
    assert key is not None
    assert key.account == account.id
    written = list(await raw.keys("*"))
    reads = {"string": raw.get, "hash": raw.hgetall}
    written += [str(await reads[kind](name)) for name in written if (kind := await raw.type(name)) in reads]
    assert all(api_key not in each and api_key[4:] not in each for each in written)
    digests = [name.removeprefix("key:") for name in written if name.startswith("key:")]
    for wrong in ("", api_key[:-1], api_key + "A", api_key.upper(), *digests, "é", "*"):
        assert await here.api_keys.identify(wrong) is None


async def test_every_account_has_a_key_of_its_own(here: Registry) -> None:
    made = [await here.create_account("Same name", "free") for _ in range(20)]
    assert len({account.id for account, _ in made}) == len({key for _, key in made}) == 20
    for account, key in made:
        assert (await here.api_keys.identify(key)).account == account.id


async def test_the_plan_of_nobody(here: Registry) -> None:
    with pytest.raises(NotFound):
        await here.change_plan("acc_none", "max")


# -- custom domains ----------------------------------------------------------------------------------------------


def with_domain(name: str, domain: str = "www.example.com", *, verified: bool = True) -> App:
    return an_app(name, customDomain=domain, customDomainVerified=verified)


async def test_a_verified_domain_belongs_to_one_app(here: Registry) -> None:
    first, second = with_domain("first"), with_domain("second")
    await here.put_app(first, None)
    await here.put_app(first, first)
    await here.put_app(replace(second, customDomainVerified=False), None)
    with pytest.raises(RequestMalformed, match="another app has this domain"):
        await here.put_app(second, replace(second, customDomainVerified=False))
    assert {app.name for app in await here.apps_of("acc_one")} == {"first", "second"}, "it stays as it was"
    assert (await here.claim_domain(first), await here.claim_domain(second)) == (True, False)

    renamed = replace(first, name="renamed")
    await here.put_app(renamed, first)
    with pytest.raises(RequestMalformed, match="another app has this domain"):
        await here.put_app(second, None)
    await here.put_app(replace(renamed, customDomain="other.example.com"), renamed)
    await here.put_app(second, None)
    await here.delete_app(second)
    await here.put_app(with_domain("third"), None)


async def test_of_many_apps_that_want_a_domain_at_once_one_gets_it(redis_url: str) -> None:
    async with process(redis_url) as one, process(redis_url) as other:
        puts = [(one, other)[number % 2].put_app(with_domain(f"app-{number}"), None) for number in range(8)]
        outcomes = await asyncio.gather(*puts, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType"] + ["RequestMalformed"] * 7


async def test_a_claim_without_its_record_lapses(here: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died between the two, or the put failed because the name was taken."""
    await compare_and_set(here.store, domain_key("www.example.com"), f"dead {time.time():.0f}")
    with pytest.raises(RequestMalformed):
        await here.put_app(with_domain("shop"), None)
    monkeypatch.setattr(registry_module, "CLAIM_SECONDS", -1.0)
    await here.put_app(with_domain("shop"), None)
    with pytest.raises(RequestMalformed, match="name"):
        await here.put_app(replace(with_domain("shop", "new.example.com"), id="other"), None)
    assert await here.store.get(domain_key("new.example.com")) is None


async def test_records_from_before_claim_their_domain_when_they_are_served(here: Registry) -> None:
    first, second = with_domain("first"), with_domain("second")
    assert [await here.claim_domain(app) for app in (second, first, second, an_app())] == [True, False, True, False]
