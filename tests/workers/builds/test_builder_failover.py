"""A deploy whose end only a lost primary has recorded: its worker records the end again on the new primary."""

import asyncio
from pathlib import Path

import pytest

from tests.fakes import FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support.deployment import host_on
from tests.support.gateway_process import Gateway, gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port, replicated, sentinels

pytestmark = pytest.mark.asyncio(loop_scope="session")

SETTINGS = {"GATEWAY_REDIS_WAIT": "1", "GATEWAY_CANARY": "2"}


async def is_ready(gw: Gateway) -> bool:
    return (await gw.http.get("/ready")).status_code == 200


@pytest.mark.parametrize("storage", ["folder", "shared"])
async def test_the_end_of_a_deploy_survives_the_loss_of_the_primary(tmp_path: Path, storage: str) -> None:
    settings, workers = SETTINGS, ("deploys", "webhooks")
    if storage == "shared":
        settings = {**SETTINGS, "GATEWAY_STORAGE_URL": f"file://{tmp_path}"}
        workers = (*workers, "sites")
    with replicated(replicas=2) as (primary, *replicas), sentinels(primary) as url:
        async with (
            FakeProvider() as provider,
            FakeReceiver() as receiver,
            gateway(url, provider, tmp_path, **settings) as gw,
            host_on(gw, receiver, free_port()) as host,
        ):
            await host.worker(*workers)
            app = await host.app()
            deploy = await host.publish(app, {"index.html": "page"})
            await host.in_state(deploy, "canary")
            for replica in replicas:
                replica.freeze()
            with primary.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "replica")  # no data for them is left in the network
            await asyncio.sleep(4)  # the canary ends, and only the primary records it
            primary.kill()
            for replica in replicas:
                replica.thaw()
            await asyncio.sleep(3)  # Sentinel notices the loss, and then `/ready`
            await wait_until(lambda: is_ready(gw), 30)
            ended = await host.over(deploy)
            assert ended["state"] == "live", ended.get("error")
            assert {kind for kind, _ in await host.events(deploy)} == {"deploy.succeeded"}
            assert await host.page(app) == "page"
