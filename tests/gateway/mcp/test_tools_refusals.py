"""What the tools refuse, and how their messages say how to correct the call."""

from typing import Any

import pytest

from tests.support.accounts import App
from tests.support.agents import over_http, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

EMAIL, APP = "ada@example.com", "<the app>"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "app": [
        ({"action": "create", "app": "My App"}, "REQUEST_MALFORMED"),
        ({"action": "create", "app": APP}, "NAME_TAKEN"),
        ({"action": "set", "app": APP}, "needs at least one of auth, repository, build"),
        ({"action": "set", "app": APP, "build": {"command": 1}}, "build.command"),
    ],
    "limits": [
        ({"action": "set", "app": APP, "dailyEuro": "1000"}, "allows at most"),
        ({"action": "set", "app": APP, "dailyEuro": 1}, "dailyEuro"),
    ],
    "delivery": [
        ({"action": "redeliver_failed", "since": 5}, "needs since"),
        ({"action": "redeliver_failed", "since": "lately"}, "since: "),
        ({"action": "show", "id": "evt_none"}, "NOT_FOUND"),
    ],
    "deploy": [
        ({"action": "cancel", "app": "x", "id": "dep_1"}, "does not take app"),
        ({"action": "show", "id": "dep_none"}, "NOT_FOUND"),
    ],
    "env": [
        *[
            (
                {"action": "set", "app": APP, "variables": given},
                'action \'set\' needs variables, such as {"NAME": "value"}.',
            )
            for given in ({}, ["A"], "A=1")
        ],
        ({"action": "unset", "app": APP}, '["NAME"]'),
        ({"action": "set", "app": APP, "variables": {"PORT": "1"}}, "REQUEST_MALFORMED"),
        ({"action": "set", "app": APP, "variables": {"A": 1}}, "REQUEST_MALFORMED"),
        ({"action": "list", "app": "none-of-mine"}, "NOT_FOUND"),
    ],
    "hook": [
        ({}, "action must be 'create' (with app and name), 'list', or 'revoke' (with id)."),
        ({"action": "create", "app": "shop", "name": "  "}, "action 'create' needs name: a label for the hook"),
        ({"action": "create", "app": "nobodys", "name": "CI"}, "no such app in this account"),
        ({"action": "revoke", "id": "../webhook"}, "no such hook in this account"),
    ],
    "logs": [
        ({"app": APP, "tail": 0}, "tail must be a number from 1 to 2000"),
        ({"app": APP, "deploy": "dep_none"}, "NOT_FOUND"),
    ],
    "members": [
        ({"action": "invite", "email": EMAIL, "role": "admin"}, "role must be one of owner, developer, viewer"),
        ({"action": "invite", "email": "nobody", "role": "viewer"}, "REQUEST_MALFORMED"),
        ({"action": "remove", "email": EMAIL}, "NOT_FOUND"),
    ],
    "usage": [
        ({"days": 401}, "days must be a number from 1 to 400"),
        ({"by": "user"}, "by must be one of app, model, provider, none"),
    ],
}


async def test_errors_say_how_to_correct_the_call(hosted: App) -> None:
    async with over_http()(hosted.gateway.address, hosted.account.key) as client:
        for tool, calls in REFUSED.items():
            for arguments, words in calls:
                given = {name: hosted.name if value == APP else value for name, value in arguments.items()}
                assert words in await refused(client, f"service_{tool}", **given), (tool, arguments)
    assert {each["by"] for each in (await hosted.account.get("/account/audit")).json()} == {"operator"}
