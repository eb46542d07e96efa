"""`capsule worker --check` reports workers of this host without a heartbeat."""

from gateway.keys import worker_key
from gateway.redis.client import Store
from gateway.settings import Settings
from workers import check, heartbeat


async def test_a_restarted_worker_with_another_number_counts(store: Store) -> None:
    settings = Settings(redis_url=store.url)
    assert "no webhooks worker" in await check.find_fault(settings, ["webhooks"])
    await store.client.set(worker_key("webhooks", heartbeat.worker_name(2)), "token", ex=15)
    assert await check.find_fault(settings, ["webhooks"]) == ""
    await store.client.set(worker_key("deploys", "another-host-1"), "token", ex=15)
    assert "no deploys worker" in await check.find_fault(settings, ["webhooks", "deploys"])
