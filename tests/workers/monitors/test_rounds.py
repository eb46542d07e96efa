"""One broken record among those that are due together costs the others nothing; an outage costs a line of the log."""

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from gateway.store import keys
from tests.support.monitored_apps import fleet
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("broken", ["not JSON", '{"id": 1}', '{"id": "x", "unknown": []}'])
async def test_a_broken_record_ends_no_round(tmp_path: Path, broken: str) -> None:
    async with fleet(tmp_path) as running:
        poisoned = await running.app()
        tag = keys.tag(poisoned.account.id)
        same = await running.app()
        while keys.tag(same.account.id) != tag:
            same = await running.app()
        client = running.queue.store.client
        whole = await client.get(keys.app_key(poisoned.app.name))
        await client.set(keys.app_key(poisoned.app.name), broken)
        worker = await running.worker()
        await same.probed(3)
        assert worker.process.poll() is None
        assert "look.unreadable" in worker.log
        assert poisoned.probes == 0
        assert await client.zscore(keys.probes_key(tag), poisoned.app.id) is not None, "it is not forgotten"
        await client.set(keys.app_key(poisoned.app.name), whole)
        await client.zadd(keys.probes_key(tag), {poisoned.app.id: 0})  # as when the lease of the round is over
        await poisoned.probed(1)
        assert await worker.stop() == 0


async def test_an_outage_is_logged_once(tmp_path: Path) -> None:
    """Sixty lines a second told of it."""
    server = RedisServer()
    worker = Worker(server.url, tmp_path)
    worker.names = ("monitors", "webhooks")

    def warnings() -> Counter[str]:
        lines = [msgspec.json.decode(line) for line in worker.log.splitlines()]
        found = Counter(line["event"] for line in lines if line["level"] == "warning")
        found.pop("leases.postponed", None)  # one line every ten seconds
        return found

    try:
        server.start()
        await worker.start()
        await worker.joined()
        server.kill()
        await wait_until(lambda: {"round.postponed", "stream.waiting"} <= warnings().keys(), 10)
        await asyncio.sleep(2)  # several rounds of sixteen partitions
        assert max(warnings().values()) <= 2  # probes and certificates have a round each
        assert sum(warnings().values()) <= 4
        server.start()
        assert await worker.stop() == 0
    finally:
        worker.kill()
        server.stop()
