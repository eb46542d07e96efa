"""The days of `capsule usage`."""

import datetime
from pathlib import Path

import pytest

from tests.fakes.server import FakeServer, answer
from tests.support.command_line import Tool


@pytest.mark.parametrize(("days", "before"), [("1", 0), ("7", 6)])
async def test_the_last_days_include_today(tmp_path: Path, days: str, before: int) -> None:
    begin = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=before)
    async with FakeServer() as service:
        service.reply = answer(200, {"rows": []})
        await Tool(service.address, "csk_key", tmp_path)("usage", "--days", days, "--by", "app")
        assert service.exchanges[-1].path == f"/account/usage?by=day&group=app&from={begin}"
        assert "--days" in await Tool(service.address, "csk_key", tmp_path).refused("usage", "--days", "401", code=2)
