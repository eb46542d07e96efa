"""The rows about Redis."""

from pathlib import Path

import pytest

from gateway.keys import LAYOUT_KEY
from gateway.redis.client import Store
from gateway.settings import Settings
from tests.support.redis_servers import RedisServer
from workers.doctor.redis import check_redis
from workers.doctor.row import Row


async def rows_of(settings: Settings) -> dict[str, Row]:
    return {row.check: row async for row in check_redis(settings)}


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    return RedisServer("redis", "--maxmemory", "500mb", folder=tmp_path)


async def test_other_settings(redis_url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.client.config_set("maxmemory-policy", "allkeys-lru")
    await store.client.set(LAYOUT_KEY, "1000")

    async def behind(_: Store) -> float:
        return -3_600.0

    monkeypatch.setattr(Store, "read_skew", behind)
    try:
        found = await rows_of(Settings(redis_url=redis_url))
    finally:
        await store.client.config_set("maxmemory-policy", "noeviction")
        await store.client.delete(LAYOUT_KEY)
    names = ("redis version", "redis persistence", "redis eviction", "redis memory", "clock", "layout")
    assert [found[name].state for name in names] == ["ok", "fail", "fail", "warn", "fail", "fail"]
    assert found["clock"].detail == "3600.0 seconds behind Redis's"


@pytest.mark.parametrize(("policy", "state"), [("always", "ok"), ("everysec", "ok"), ("no", "fail")])
async def test_a_disk_that_redis_does_not_wait_for(server: RedisServer, policy: str, state: str) -> None:
    with server:
        with server.client() as client:
            client.config_set("appendfsync", policy)
        row = (await rows_of(Settings(redis_url=server.url)))["redis persistence"]
    assert (row.state, f"appendfsync {policy}" in row.detail) == (state, True)


async def test_options_that_the_access_list_hides(server: RedisServer) -> None:
    with server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-config")
        found = await rows_of(Settings(redis_url=server.url))
    assert found["redis persistence"] == Row("redis persistence", "ok", "the append-only file is on")


async def test_too_few_replicas(server: RedisServer) -> None:
    with server:
        found = await rows_of(Settings(redis_url=server.url, redis_wait=1))
    detail = "fewer replicas of Redis confirm writes than GATEWAY_REDIS_WAIT requires"
    assert found["redis"] == Row("redis", "fail", detail, "start more replicas")
    assert found["redis persistence"].state == "ok"  # what else could be wrong is named too
