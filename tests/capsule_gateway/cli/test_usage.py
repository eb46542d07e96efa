"""The days of `capsule usage`."""

import datetime

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.support.command_line import Tool


@pytest.mark.asyncio(loop_scope="session")
async def test_the_last_days_include_today(stubbed: Tool, service: Service) -> None:
    service.answers["GET /account/usage"] = {"rows": []}
    today = datetime.datetime.now(datetime.UTC).date()
    for days in (1, 7):
        await stubbed("usage", "--days", str(days), "--by", "app")
        begin = today - datetime.timedelta(days=days - 1)
        assert service.calls[-1] == f"GET /account/usage?by=day&group=app&from={begin}"
    assert "--days" in await stubbed.refused("usage", "--days", "401", code=2)
