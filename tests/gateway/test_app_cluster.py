"""The gateway on Redis Cluster, with accounts on all three primaries, and during failovers and migrations of slots."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from gateway.keys import INFERENCE_KEY, app_key, partition_tag
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk, tokens
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import CLOSE, answer
from tests.support.accounts import Account, App
from tests.support.deployment import all_processes
from tests.support.deploys import publish, report_phases
from tests.support.dns_server import DnsServer
from tests.support.fixtures import module_fixture
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.redis_servers import ReplicatedCluster, cluster, replicated_cluster
from tests.support.responses import answered, counted, refused, text_of
from tests.support.webhook_holder import DELIVERIES, WEBHOOK, Holder
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


@module_fixture
async def clustered(
    provider: FakeProvider, resolver: DnsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = {"GATEWAY_DEPLOY_ENGINE": "external", "GATEWAY_DNS": resolver.address}
    with cluster("redis") as url:
        async with gateway(url, provider, folder, **settings) as gw:
            yield gw


async def test_smoke(clustered: Gateway, provider: FakeProvider, backend: FakeAppBackend) -> None:
    gw = clustered
    apps = [await gw.app(backend) for _ in range(20)]
    prompt = provider.plays(tokens("Bon", "jour", usage=(7, 3)))
    answers = await asyncio.gather(*(app.ask(prompt) for app in apps))
    assert {answered(a)["text"] for a in answers} == {"Bonjour"}
    for app in apps:
        assert await app.account.settled() == cost(7, 3)
    app = apps[0]
    assert text_of(await app.events(prompt)) == "Bonjour"
    cut = provider.plays(ROLE, chunk("a"), CLOSE)
    refused(await app.ask(cut), 502, "PROVIDER_ERROR")
    assert await app.account.settled() == 2 * cost(7, 3) + max_cost(cut)
    assert counted(await app.ask("x"))[1] == 16
    for _ in range(16):
        await app.ask("x")
    refused(await app.ask("x"), 429, "USER_RATE_LIMITED")
    for capped in apps[1:4]:
        at = f"/account/apps/{capped.name}"
        for field, code in (("userDailyEuro", "USER_CAP_REACHED"), ("dailyEuro", "APP_CAP_REACHED")):
            limits = {"userDailyEuro": None, field: "0.002"}
            assert (await capped.account.call("PUT", f"{at}/limits", limits)).is_success
            assert (await capped.ask(prompt, token=capped.token("ben"))).status_code == 200
            assert (await capped.account.call("PUT", f"{at}/limits", {field: "0"})).is_success
            refused(await capped.ask(prompt, token=capped.token("ben")), 402, code)
        assert await capped.account.settled() == 3 * cost(7, 3)
        assert (await capped.account.get(f"{at}/spend")).json()["settled"] == 3 * cost(7, 3)
    assert [a["name"] for a in (await app.account.get("/account/apps")).json()] == [app.name]

    path = "/account/requests"
    logged = await wait_until(lambda: app.account.get(path), 10, holds=lambda answer: len(answer.json()) == 21)
    assert sum(row["nanoEuro"] for row in logged.json()) == await app.account.settled()
    for each in apps:
        settled = await each.account.settled()

        async def is_counted(account: Account = each.account, settled: int = settled) -> bool:
            (day, *_) = (await account.get("/account/usage?by=day")).json()["rows"]
            return bool(day["nanoEuro"] == settled)

        await wait_until(is_counted, 10)
    await gw.switch(enabled=False)
    await wait_until(lambda: apps[1].ask("x"), PATIENCE_SECONDS, 0.1, holds=lambda answer: answer.status_code == 503)
    assert (await gw.http.get("/ready")).status_code == 200
    assert (await gw.platform("DELETE", f"apps/{app.name}")).status_code == 204
    await gw.switch(enabled=True)


async def test_deploys(clustered: Gateway, backend: FakeAppBackend) -> None:
    gw = clustered
    for app in [await gw.app(backend) for _ in range(6)]:
        account, deploys = app.account, []
        for _ in range(3):
            deploys.append((await publish(account, app.name)).json()["deployId"])
            if len(deploys) < 3:
                await report_phases(gw, deploys[-1], "build", "health", "canary")
        back = await account.call("POST", f"/account/apps/{app.name}/rollback")
        assert back.status_code == 202, back.text
        deploys.append(back.json()["deployId"])
        canceled = await account.call("POST", f"/account/deploys/{deploys[-1]}/cancel")
        assert canceled.json()["state"] == "canceled", canceled.text
        listed = (await account.get("/account/deploys?limit=1000")).json()
        assert [deploy["id"] for deploy in listed] == deploys[::-1]
        assert [deploy["state"] for deploy in listed] == ["canceled", "canceled", "live", "live"]
        changed = await account.call("PUT", f"/account/apps/{app.name}/env", {"A": "b"})
        assert [each["name"] for each in changed.json()] == ["A"]
        own = await account.call("POST", "/account/apps", {"name": f"{app.name}-own"})
        assert own.status_code == 201, own.text
        body = {"build": {"command": "make"}}
        assert (await account.call("PATCH", f"/account/apps/{app.name}-own", body)).is_success
        for each in (app.name, f"{app.name}-own"):
            assert (await account.call("DELETE", f"/account/apps/{each}")).status_code == 204
    assert (await gw.platform("GET", "deploys?state=queued")).json() == []


async def test_events(clustered: Gateway, receiver: FakeReceiver, tmp_path: Path) -> None:
    """A worker reads all partitions. Secrets are rotated, and failed events are sent again."""
    gw = clustered
    async with Worker(gw.environment["GATEWAY_REDIS_URL"], tmp_path, confidential=gw.confidential):
        for holder in [Holder(await gw.account(), receiver) for _ in range(2)]:
            await holder.set()
            rotated = (await holder.call("POST", f"{WEBHOOK}/rotate")).json()["secret"]
            gw.confidential.add(rotated)
            receiver.plays(holder.path, answer(500))
            event = await holder.test()
            await holder.logged(1)
            receiver.plays(holder.path)
            failed = {"since": "2020-01-01", "outcome": "failed"}
            again = await holder.call("POST", f"{DELIVERIES}/redeliver", failed)
            assert (again.status_code, again.json()) == (202, {"count": 1})
            rows = [(row["id"], row["outcome"]) for row in await holder.logged(2)]
            assert rows == [(event, "delivered"), (event, "failed")]
            for exchange in receiver.got(holder.path):
                verified(exchange, rotated)
            assert "previousSecretUntil" in (await holder.call("GET")).json()
            assert (await holder.call("DELETE")).status_code == 204


RECOVERY_SECONDS = 15  # less than one on an idle machine


class Load:
    """Sends requests of every app, one after another, until it is stopped."""

    def __init__(self, apps: list[App], prompt: str) -> None:
        self.apps, self.prompt = apps, prompt
        self.answers: dict[str, list[int]] = {app.name: [] for app in apps}
        self._stopping = False

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._ask(app)) for app in self.apps]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, app: App) -> None:
        while not self._stopping:
            response = await app.ask(self.prompt)
            if response.status_code != 200:
                assert response.json()["error"]["code"] == "BACKBONE_UNAVAILABLE", response.text
            self.answers[app.name].append(response.status_code)
            await asyncio.sleep(0.02)

    async def wait_for_answers(self, apps: list[App], times: int = 3) -> None:
        """Waits until `times` requests in a row of each app are answered."""
        began = {app.name: len(self.answers[app.name]) for app in apps}

        def all_pass() -> bool:
            recent = [self.answers[app.name][began[app.name] :][-times:] for app in apps]
            return all(each == [200] * times for each in recent)

        await wait_until(all_pass, RECOVERY_SECONDS)


def node_of(servers: ReplicatedCluster, app: App) -> int:
    """Returns the index of the primary with the account's keys. The app's record may be on another one."""
    return servers.owner(key_slot(partition_tag(app.account.id).strip("{}").encode()))


async def move_slot(servers: ReplicatedCluster, gw: Gateway, load: Load, app: App) -> None:
    """Moves the slot of the app's account key by key, so that a script's keys are on two nodes for a while.

    Until the slot has moved, Redis rejects scripts of which some key does not exist (TRYAGAIN).
    """
    slot = key_slot(partition_tag(app.account.id).strip("{}").encode())
    source = servers.primaries[servers.owner(slot)]
    target = servers.primaries[(servers.owner(slot) + 1) % 3]
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old.execute_command("CLUSTER MYID"))
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new.execute_command("CLUSTER MYID"))
        while found := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "KEYS", *found)
            await asyncio.sleep(0.02)
        for node in (new, old):
            node.execute_command("CLUSTER SETSLOT", slot, "NODE", new.execute_command("CLUSTER MYID"))
    await load.wait_for_answers([app])


async def test_failovers_and_a_migrating_slot(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    prompt = provider.plays(tokens("Bon", "jour", usage=(7, 3)))
    with replicated_cluster() as servers:
        async with FakeReceiver() as site, all_processes(servers.url, provider, site, tmp_path) as host:
            gw, hosted = host.gateway, await host.app()
            apps = [await gw.app(backend) for _ in range(12)]
            lost = servers.owner(key_slot(INFERENCE_KEY.encode()))

            def has_only_its_record_there(app: App) -> bool:
                return node_of(servers, app) != lost and servers.owner(key_slot(app_key(app.name).encode())) == lost

            while not any(map(has_only_its_record_there, apps)):
                apps.append(await gw.app(backend))
            unconcerned = [app for app in apps if node_of(servers, app) != lost]
            async with Load(apps, prompt) as load:
                await load.wait_for_answers(apps)

                # The primary with the switch and some apps' records fails: accounts on the others are always served.
                before = {app.name: len(load.answers[app.name]) for app in unconcerned}
                servers.primaries[lost].kill()
                await load.wait_for_answers(unconcerned, times=20)
                for app in unconcerned:
                    assert set(load.answers[app.name][before[app.name] :]) == {200}, app.name
                await asyncio.to_thread(servers.fail_over, lost)
                await load.wait_for_answers(apps)
                first = await host.over(await host.publish(hosted, {"index.html": "one"}))
                assert first["state"] == "live", first
                assert [kind for kind, _ in await host.events(first["id"])] == ["deploy.succeeded"]

                await asyncio.to_thread(servers.fail_back, lost)
                await load.wait_for_answers(apps)
                await move_slot(servers, gw, load, apps[0])

                # Another primary fails during a deploy.
                other = (lost + 1) % 3
                deploying = await host.publish(hosted, {"index.html": "two"})
                servers.primaries[other].kill()
                await asyncio.to_thread(servers.fail_over, other)
                await load.wait_for_answers(apps)
                assert (await host.over(deploying))["state"] in ("live", "failed")
                second = await host.over(await host.publish(hosted, {"index.html": "three"}))
                assert second["state"] == "live", second
                assert await host.page(hosted) == "three"

                site.default = answer(503)
                await wait_until(lambda: "app.unhealthy" in [each.json["type"] for each in host.receiver.got()], 20)
            for app in apps:
                assert await app.account.settled() >= cost(7, 3)
