"""`capsule apps remove` in a terminal."""

import asyncio
from pathlib import Path

from tests.fakes.server import FakeServer
from tests.support.command_line import Tool, run_in_terminal


async def test_a_deletion_asks_for_the_name(tmp_path: Path) -> None:
    async with FakeServer() as service:
        capsule = Tool(service.address, "csk_key", tmp_path)
        remove = ("apps", "remove", "shop")
        seen = await asyncio.to_thread(run_in_terminal, capsule, *remove, given="other\n")
        assert "nothing was deleted" in seen
        assert not service.exchanges
        assert "Deleted shop" in await asyncio.to_thread(run_in_terminal, capsule, *remove, given="shop\n")
        assert [(each.method, each.path) for each in service.exchanges] == [("DELETE", "/account/apps/shop")]
