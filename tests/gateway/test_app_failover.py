"""All processes during failovers and migrations of slots in Redis Cluster, and the gateway during a restart."""

import asyncio
from pathlib import Path

import pytest
from redis.crc import key_slot

from gateway.keys import INFERENCE_KEY, app_key, partition_tag
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import tokens
from tests.fakes.receiver import FakeReceiver
from tests.fakes.server import answer
from tests.support.accounts import App
from tests.support.deployment import all_processes
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.prices import cost
from tests.support.redis_servers import ReplicatedCluster, replicated_cluster

pytestmark = pytest.mark.asyncio(loop_scope="session")
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
