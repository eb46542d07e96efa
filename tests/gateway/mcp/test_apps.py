"""The agent tools about apps, with the SDK's own client."""

import secrets
from typing import Any

import pytest

from tests.support.accounts import App
from tests.support.agents import call, over_http, refused
from tests.support.polling import wait_until

APP, LIMITS, USAGE = "service_app", "service_limits", "service_usage"

pytestmark = pytest.mark.asyncio(loop_scope="session")


# -- service_app ---------------------------------------------------------------------------------------------


async def test_create_set_show_list_and_delete(hosted: App) -> None:
    name = f"mine-{secrets.token_hex(4)}"
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        created = (await call(client, APP, action="create", app=name))["app"]
        assert created["name"] == name
        build = {"command": "npm run build", "output": "out"}
        settings = (await call(client, APP, action="set", app=name, build=build))["settings"]
        assert settings["build"] == build
        secret = {"kind": "secret", "secret": secrets.token_hex(20)}
        answered = await call(client, APP, action="set", app=name, auth=secret, repository=None)
        assert answered["settings"]["auth"]["kind"] == "secret"
        assert secret["secret"] not in str(answered)
        assert answered["settings"]["build"] == build
        shown = (await call(client, APP, action="show", app=name))["app"]
        assert (shown["settings"]["build"], shown["findings"], shown["crashes"]) == (build, [], [])
        assert (await call(client, APP, action="set", app=name, build=None))["settings"]["build"] is None
        assert {app["name"] for app in (await call(client, APP, action="list"))["apps"]} == {
            name,
            hosted.name,
        }
        assert await call(client, APP, action="delete", app=name) == {"deleted": name}
        assert "NOT_FOUND" in await refused(client, APP, action="show", app=name)


# -- service_limits ------------------------------------------------------------------------------------------


async def test_show_and_set(app: App) -> None:
    async with over_http()(app.gateway.address, app.account.key) as client:
        none = (await call(client, LIMITS, action="show", app=app.name))["limits"]
        assert set(none.values()) == {None}
        limits = (await call(client, LIMITS, action="set", app=app.name, dailyEuro="0.02", requestsPerMinute=0))[
            "limits"
        ]
        assert limits == {**none, "dailyEuro": "0.02", "requestsPerMinute": 0}
        shown = await call(client, LIMITS, action="show", app=app.name)
        assert (shown["limits"], shown["spend"]["cap"]) == (limits, 20_000_000)
        assert shown["spend"]["widest"]["requestsPerMinute"] >= 1
        cleared = await call(client, LIMITS, action="set", app=app.name, dailyEuro=None)
        assert cleared["limits"] == {**none, "requestsPerMinute": 0}


# -- service_usage -------------------------------------------------------------------------------------------


async def test_days_by_app_and_model(app: App) -> None:
    assert (await app.ask("Hello")).status_code == 200
    async with over_http()(app.gateway.address, app.account.key) as client:

        async def rows(**arguments: Any) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await call(client, USAGE, **arguments))["rows"]
            return found

        [row] = await wait_until(rows)
        assert row["requests"] == 1
        assert row["nanoEuro"] > 0
        assert [each["app"] for each in await rows(by="app", days=1)] == [app.name]
        assert [bool(each["model"]) for each in await rows(by="model", days="30")] == [True]
        assert [bool(each["provider"]) for each in await rows(by="provider", days=1)] == [True]
