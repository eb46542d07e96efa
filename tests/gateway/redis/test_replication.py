"""Scripts that wait for replicas, on one server, behind Sentinel, and in a cluster."""

import asyncio

import pytest
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.errors import BackboneUnavailable, NotReplicated
from gateway.inference.spend import scripts
from gateway.inference.spend.limits import Limits
from gateway.keys import PARTITION_TAGS, partition_tag
from gateway.redis.client import Store
from gateway.redis.replication import Replicated, ReplicatedPipeline
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, ReplicatedCluster, acknowledges, sentinels
from tests.support.stores import opened

ACCOUNTS = [
    next(name for name in (f"acc_{n}" for n in range(999)) if partition_tag(name) == tag) for tag in PARTITION_TAGS
]

SLOTS = [key_slot(tag.strip("{}").encode()) for tag in PARTITION_TAGS]


async def reserve(store: Store, account: str) -> None:
    await scripts.admit(store, account, "shop", "ana", Limits(99, 99, 99), 1, reservation="r", life=1, deadline=0)
    await scripts.settle(store, partition_tag(account), "r", 0)


async def is_refused(store: Store, account: str) -> bool:
    try:
        await reserve(store, account)
    except NotReplicated:
        return True
    except BackboneUnavailable:
        return False
    finally:
        await scripts.settle(store, partition_tag(account), "r", 0)
    return False


async def test_concurrent_calls_share_one_wait(redis_url: str) -> None:
    pipeline = ReplicatedPipeline(redis_url, 2.0, None, 1)
    store = Store(redis_url)
    try:
        await store.client.config_resetstat()
        echo = ("EVAL", "return ARGV[1]", 0)
        replies = await asyncio.gather(*[pipeline.call(*echo, n) for n in range(50)])
        assert replies == [Replicated(str(n), 0) for n in range(50)]
        assert (await store.client.info("commandstats"))["cmdstat_wait"]["calls"] == 1
        # The calls during a WAIT form the next group.
        calls = [asyncio.create_task(pipeline.call(*echo, 0))]
        await asyncio.sleep(0.1)
        calls += [asyncio.create_task(pipeline.call(*echo, n)) for n in range(1, 50)]
        calls[7].cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer.answer for answer in answers if isinstance(answer, Replicated)] == [
            str(n) for n in range(50) if n != 7
        ]
        assert (await store.client.info("commandstats"))["cmdstat_wait"]["calls"] == 3
    finally:
        await pipeline.close()
        await store.close()


async def test_every_call_fails_in_time_if_the_server_is_silent(redis_url: str, valkey: RedisServer) -> None:
    """Including the calls that wait for an earlier group."""
    pipeline = ReplicatedPipeline(redis_url, 1.0, None, 1)
    echo = ("EVAL", "return ARGV[1]", 0)
    await pipeline.call(*echo, 0)
    valkey.freeze()
    try:
        began = asyncio.get_running_loop().time()
        first = asyncio.create_task(pipeline.call(*echo, 1))
        await asyncio.sleep(0.1)
        slept = asyncio.get_running_loop().time() - began  # on a busy machine, longer than the timeout
        answers = await asyncio.gather(first, *[pipeline.call(*echo, n) for n in range(9)], return_exceptions=True)
        assert all(isinstance(answer, RedisConnectionError | TimeoutError) for answer in answers), answers
        assert asyncio.get_running_loop().time() - began < 2 + slept
    finally:
        valkey.thaw()
    assert (await pipeline.call(*echo, 7)).answer == "7"
    await pipeline.close()


async def test_a_cluster_waits_for_the_replica_of_the_primary_that_ran_the_script(cluster: ReplicatedCluster) -> None:
    async with opened(cluster.url, replicas=1) as store:
        for primary in cluster.primaries:
            await wait_until(lambda primary=primary: asyncio.to_thread(acknowledges, primary))
        assert not any(await asyncio.gather(*[is_refused(store, account) for account in ACCOUNTS]))
        assert await store.check_writes() == (16, [])
        cluster.replicas[0].freeze()
        assert len((await store.check_writes())[1]) == sum(owners := [cluster.owner(slot) == 0 for slot in SLOTS])
        refused = await asyncio.gather(*[is_refused(store, account) for account in ACCOUNTS])
        cluster.replicas[0].thaw()
        assert refused == owners
        assert any(refused)


async def test_behind_sentinel() -> None:
    with (
        RedisServer("redis", "--repl-diskless-sync-delay", "0") as primary,
        RedisServer("redis", "--replicaof", f"127.0.0.1 {primary.port}"),
    ):
        await wait_until(lambda: asyncio.to_thread(acknowledges, primary))
        with sentinels(primary) as url:
            async with opened(url, replicas=1) as store:
                await reserve(store, "acc")
            async with opened(url, replicas=2) as store:
                with pytest.raises(NotReplicated):
                    await reserve(store, "acc")
                await scripts.settle(store, partition_tag("acc"), "r", 0)
