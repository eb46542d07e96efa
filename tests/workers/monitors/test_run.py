"""The worker runs all monitors, and a broken record stops none of them."""

import secrets

import pytest

from gateway.accounts.domain_names import record_name
from gateway.accounts.records import Domain
from gateway.keys import certificates_key, partition_tag, stream_key, tagged_deploy_key
from tests.support.dns_server import dns_server
from tests.support.monitored_apps import Fleet
from tests.support.polling import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_broken_deploys_of_an_external_engine(own: Fleet) -> None:
    domain = f"{secrets.token_hex(4)}.example.com"
    app = await own.app(domains=(Domain(domain, verified=True, proven=True),))
    client, tag, due = own.queue.store.client, partition_tag("acc_1"), certificates_key(partition_tag(app.account.id))
    for entry in ({"garbage": "1"}, {"id": "dep_1", "account": "acc_1", "app": "app_1"}):
        await client.xadd(stream_key(tag, "builds"), entry)
    await client.hset(tagged_deploy_key(tag, "dep_1"), mapping={"id": "dep_1", "state": "no such state"})
    await client.expire(tagged_deploy_key(tag, "dep_1"), 600)
    async with dns_server() as resolver:
        worker = await own.worker("monitors", GATEWAY_DEPLOY_ENGINE="external", GATEWAY_DNS=resolver.address)
        worker.tracebacks_allowed = True
        await wait_until(lambda: "deploys.unreadable" in worker.log, 10)
        await app.probed(3)
        await wait_until(lambda: record_name(domain) in resolver.asked, 20)
        await wait_until(lambda: client.zscore(due, app.app.id), 10)  # 0 until its certificate is inspected
        assert worker.code is None
        assert await worker.stop() == 0
