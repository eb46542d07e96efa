"""A broken record stops none of the monitors."""

import pytest

from gateway.keys import partition_tag, stream_key, tagged_deploy_key
from tests.support.monitored_apps import Fleet
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_broken_deploys_of_an_external_engine(own: Fleet) -> None:
    app = await own.app()
    client = own.queue.store.client
    tag = partition_tag("acc_1")
    for entry in ({"garbage": "1"}, {"id": "dep_1", "account": "acc_1", "app": "app_1"}):
        await client.xadd(stream_key(tag, "builds"), entry)
    await client.hset(tagged_deploy_key(tag, "dep_1"), mapping={"id": "dep_1", "state": "no such state"})
    await client.expire(tagged_deploy_key(tag, "dep_1"), 600)
    worker = await own.worker("monitors", GATEWAY_DEPLOY_ENGINE="external")
    worker.tracebacks_allowed = True
    await wait_until(lambda: "deploys.unreadable" in worker.log, 10)
    await app.probed(3)
    assert worker.code is None
    assert await worker.stop() == 0
