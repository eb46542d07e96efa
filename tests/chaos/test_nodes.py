"""The servers of a run, as the run sees them."""

import asyncio
from pathlib import Path

from tests.chaos.nodes import Cluster
from tests.support.polling import wait_until


async def test_expiries_are_read_while_a_primary_stands_still(tmp_path: Path) -> None:
    keys = [f"heartbeat:{number}" for number in range(30)]
    with Cluster(tmp_path / "redis").run() as servers:
        await wait_until(servers.takes_writes)
        for key in keys:
            await servers.execute("SET", key, 1, "EX", 60)
        assert set(await servers.read_ttls(keys)) == set(keys)
        (await servers.find_primaries())[0].freeze()
        async with asyncio.timeout(5):
            assert 10 < len(await servers.read_ttls(keys)) < 30
        for node in servers.nodes:
            await node.connection.aclose()
