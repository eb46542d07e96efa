"""`capsule apps remove` in a terminal."""

import asyncio

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.support.command_line import Tool, run_in_terminal


@pytest.mark.asyncio(loop_scope="session")
async def test_a_deletion_asks_for_the_name(stubbed: Tool, service: Service) -> None:
    remove = ("apps", "remove", "shop")
    seen = await asyncio.to_thread(run_in_terminal, stubbed, *remove, given="other\n")
    assert "nothing was deleted" in seen
    assert not service.exchanges
    assert "Deleted shop" in await asyncio.to_thread(run_in_terminal, stubbed, *remove, given="shop\n")
    assert service.calls == ["DELETE /account/apps/shop"]
