"""The store with single servers and with a cluster of three."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.crc

from gateway.errors import BackboneUnavailable, SpendCapReached
from gateway.inference.spend import scripts
from gateway.inference.spend.limits import Limits
from gateway.keys import PARTITION_TAGS, partition_tag
from gateway.redis import client as store_module
from gateway.redis.client import LUA_FOLDER, Store, patient
from gateway.redis.errors import map_redis_errors
from gateway.redis.scripts import CHANGES_CHANNEL, compare_and_set
from tests.support.logs import captured
from tests.support.redis_servers import RedisServer, ReplicatedCluster
from tests.support.stores import opened
from tests.support.tcp_proxy import Proxy
from workers.monitors.run import settle_overdue

# -- names -------------------------------------------------------------------------------------------------------


def test_a_partition_is_the_crc_16_of_the_account() -> None:
    # Redis's own sum: its slots are CRC-16 mod 16384, of which 16 is a divisor.
    for account in ("acc_1", "é", ""):
        assert partition_tag(account) == PARTITION_TAGS[redis.crc.key_slot(account.encode()) % 16]
    assert len(PARTITION_TAGS) == 16


def test_each_script_opens_with_its_contract() -> None:
    for path in LUA_FOLDER.rglob("*.lua"):
        text = path.read_text()
        contract, _, body = text.partition("\n\n")
        assert contract.startswith(f"-- {path.name}: ")
        if "KEYS[" in text:
            assert all(word in contract for word in ("-- KEYS", "-- Returns")), path
        assert ("-- ARGV" in contract) == ("ARGV" in body), path


# -- one server --------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with a password, which also listens on a unix socket."""
    server = RedisServer("valkey", "--unixsocket", str(tmp_path / "s"), "--requirepass", "secret")
    server.answers = lambda: (tmp_path / "s").exists()  # type: ignore[method-assign]
    yield server.start()
    server.stop()


@pytest.mark.parametrize("address", ["unix://:secret@{folder}/s?db=2", "redis://:secret@127.0.0.1:{port}/2"])
async def test_every_connection_uses_the_password_and_the_database(
    locked: RedisServer, tmp_path: Path, address: str
) -> None:
    url = address.format(folder=tmp_path, port=locked.port)
    async with opened(url) as store, store.subscription(CHANGES_CHANNEL) as subscription:
        assert (await subscription.get_message(timeout=1))["type"] == "subscribe"
        await compare_and_set(store, "app:shop", "{}")
        assert (await subscription.get_message(timeout=1))["data"] == "app:shop"
        assert await scripts.list_expired_reservations(store, "{p09}", 1) == []
        assert await store.client.dbsize() == 1
        assert store.client.get_connection_kwargs()["db"] == 2


async def write(store: Store) -> None:
    with map_redis_errors():
        await store.client.set("written", 1, ex=60)


async def test_connections_leave_a_demoted_primary(tmp_path: Path) -> None:
    """After a failover behind one address, connections to the old primary still work, and it refuses every write."""
    old, new = RedisServer("valkey").start(), RedisServer("valkey").start()
    try:
        async with Proxy(old.port) as proxy, opened(proxy.url) as store:
            assert await compare_and_set(store, "app:shop", "{}")
            await store.client.set("warm", 1)
            with old.client() as client:
                client.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
            proxy.target = new.port
            refusals = 0
            for attempt in (lambda: compare_and_set(store, "app:shop", "{}"), lambda: write(store)):
                for _ in range(2):
                    try:
                        await attempt()
                    except BackboneUnavailable:
                        refusals += 1
                assert await attempt() is not False
            assert refusals <= 2, "each kind of connection reaches the old primary once"
            with new.client() as client:
                assert client.get("app:shop") == b"{}"
    finally:
        old.stop()
        new.stop()


# -- a patient view ----------------------------------------------------------------------------------------------


class Failing:
    """A service whose method fails after its first step, with one of these errors after the other."""

    def __init__(self, *errors: type[Exception]) -> None:
        self.errors, self.steps = [*errors], list[str]()

    async def change(self, subject: str, *, to: int) -> int:
        self.steps.append(subject)
        if self.errors:
            raise self.errors.pop(0)
        return to


async def test_a_patient_view_repeats_the_whole_call_and_passes_other_errors_on() -> None:
    failing = Failing(BackboneUnavailable, BackboneUnavailable)
    with captured(store_module) as lines:
        assert await patient(failing, waiting="test.waiting").change("app", to=5) == 5
    assert failing.steps == ["app"] * 3
    assert [line["event"] for line in lines] == ["test.waiting"]
    with pytest.raises(SpendCapReached):
        await patient(Failing(SpendCapReached)).change("app", to=5)


async def test_a_patient_store_waits_for_the_server(tmp_path: Path) -> None:
    with RedisServer("valkey", folder=tmp_path) as server:
        async with opened(server.url) as store:
            await compare_and_set(store, "app:shop", "{}")
            server.kill()
            reading = asyncio.create_task(patient(store).get("app:shop"))
            writing = asyncio.create_task(compare_and_set(patient(store), "app:toys", "{}"))
            await asyncio.sleep(0.3)
            assert not reading.done()
            server.start()
            assert await reading == "{}"
            assert await writing


# -- a cluster ---------------------------------------------------------------------------------------------------


async def test_leases_are_found_on_every_node(cluster: ReplicatedCluster) -> None:
    by_tag = {partition_tag(f"acc_{n}"): f"acc_{n}" for n in range(500)}
    async with opened(cluster.url) as store:
        for account in (by_tag[tag] for tag in PARTITION_TAGS):
            given = {"reservation": f"r-{account}", "life": 0, "deadline": 0}
            decision = await scripts.admit(store, account, "b", "u", Limits(30, 20, 50_000_000), 5, **given)
            assert decision.verdict == "ok"
        assert await settle_overdue(store) == len(PARTITION_TAGS)
        assert await settle_overdue(store) == 0
