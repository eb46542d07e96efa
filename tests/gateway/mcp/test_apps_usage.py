"""The agent tool `service_usage`, with the SDK's own client."""

from typing import Any

import pytest

from tests.support.accounts import App
from tests.support.agents import call, over_http, refused
from tests.support.polling import wait_until

TOOL = "service_usage"

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_days_by_app_and_model(app: App) -> None:
    assert (await app.ask("Hello")).status_code == 200
    async with over_http()(app.gateway.address, app.account.key) as client:

        async def rows(**arguments: Any) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await call(client, TOOL, **arguments))["rows"]
            return found

        [row] = await wait_until(rows)
        assert row["requests"] == 1
        assert row["nanoEuro"] > 0
        assert [each["app"] for each in await rows(by="app", days=1)] == [app.name]
        assert [bool(each["model"]) for each in await rows(by="model", days="30")] == [True]
        for days in (0, 401, -1, "x", 1.5, True, "000000001" + "0" * 5_000, "٣"):
            assert "days must be a number from 1 to 400" in await refused(client, TOOL, days=days)
        assert [bool(each["provider"]) for each in await rows(by="provider", days=1)] == [True]
        assert "by must be one of app, model, provider, none" in await refused(client, TOOL, by="user")
