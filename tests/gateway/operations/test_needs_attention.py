"""Unhealthy apps, expiring certificates, and deploys that failed within a day are listed."""

import msgspec

from gateway.accounts.records import App
from gateway.deploys.records import Origin
from gateway.keys import (
    certificate_ends_key,
    certificate_key,
    failed_deploys_key,
    health_key,
    partition_tag,
    site_key,
    unhealthy_key,
)
from gateway.monitors.health import AppHealth
from gateway.operations.needs_attention import (
    EXPIRING_MS,
    count_ended_deploys,
    count_expiring_certificates,
    count_failed_deploys,
    count_unhealthy_apps,
    list_failed_deploys,
    list_unhealthy_apps,
)
from gateway.services import Services

NOW = 1_782_979_200_000


async def put_app(gateway: Services, name: str) -> App:
    account, _ = await gateway.registry.create_account("Vreni", "max")
    app = App(id=name, name=name, account=account.id, createdAt="2026-07-02T10:00:00.000Z")
    await gateway.registry.put_app(app, None)
    await gateway.store.client.hset(site_key(account.id, name), mapping={"live": "dep_1", "source": "src_1"})
    return app


async def test_unhealthy_apps(gateway: Services) -> None:
    shop, blog, cafe = [await put_app(gateway, name) for name in ("shop", "blog", "cafe")]
    for app, health in (
        (shop, AppHealth(status="unhealthy", since=NOW)),
        (blog, AppHealth(status="unhealthy", since=NOW - 1000)),
        (cafe, AppHealth(status="healthy", since=NOW)),  # its monitor died before it removed the app
    ):
        tag = partition_tag(app.account)
        await gateway.store.client.hset(health_key(tag, app.id), "state", msgspec.json.encode(health).decode())
        await gateway.store.client.zadd(unhealthy_key(tag), {app.id: health.since})
    assert [app.id for app, _ in await list_unhealthy_apps(gateway.registry, 10)] == ["blog", "shop"]
    assert [app.id for app, _ in await list_unhealthy_apps(gateway.registry, 1)] == ["blog"]
    assert await count_unhealthy_apps(gateway.registry) == 2
    assert await gateway.store.client.zscore(unhealthy_key(partition_tag(cafe.account)), cafe.id) is None
    await gateway.registry.delete_app(shop)
    assert await count_unhealthy_apps(gateway.registry) == 1


async def test_expiring_certificates(gateway: Services) -> None:
    for name, end in (("shop", NOW + EXPIRING_MS), ("blog", NOW + EXPIRING_MS + 1), ("cafe", NOW)):
        app = await put_app(gateway, name)
        tag = partition_tag(app.account)
        await gateway.store.client.zadd(certificate_ends_key(tag), {name: end})
        if name != "cafe":  # it no longer has a custom domain
            await gateway.store.client.hset(certificate_key(tag, name), "expiresAt", end)
    assert await count_expiring_certificates(gateway.store, NOW) == 1
    assert await gateway.store.client.zscore(certificate_ends_key(tag), "cafe") is None


async def test_failed_deploys(gateway: Services) -> None:
    deploys, records = gateway.deploys, gateway.deploy_records
    app = await put_app(gateway, "shop")
    deploy = await records.get(await deploys.queue(app, "operator", Origin(), source="src_1"), app.account)
    assert deploy is not None
    await deploys.advance(await deploys.start(deploy), "build", False, "exit status 1")
    (failed,) = await list_failed_deploys(gateway.store, 10)
    assert (failed.id, failed.error) == (deploy.id, "build: exit status 1")
    second = await records.get(await deploys.queue(app, "operator", Origin(), source="src_2"), app.account)
    assert second is not None
    await deploys.cancel(second, "not needed")
    assert await count_ended_deploys(gateway.store) == {"failed": 1, "canceled": 1}
    seconds, _ = await gateway.store.client.time()
    assert await count_failed_deploys(gateway.store, seconds * 1000) == 1
    key = failed_deploys_key(partition_tag(app.account))
    assert 0 < await gateway.store.client.ttl(key) <= 86_400
    await gateway.store.client.zadd(key, {f"{app.account} {deploy.id}": (seconds - 90_000) * 1000})  # yesterday
    await gateway.store.client.expire(key, 60)
    assert await list_failed_deploys(gateway.store, 10) == []
    assert await count_failed_deploys(gateway.store, seconds * 1000) == 0
