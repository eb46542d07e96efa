"""One broken record among those that are due together costs the others nothing."""

from pathlib import Path

import pytest

from gateway.store import keys
from tests.support.monitored_apps import fleet

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
