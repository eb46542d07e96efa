"""What the tools refuse, and how their messages say how to correct the call, over both transports."""

from typing import Any

import pytest

from tests.support.accounts import App
from tests.support.agents import Connect, refused

pytestmark = pytest.mark.asyncio(loop_scope="session")

EMAIL, APP = "ada@example.com", "<the app>"
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "app": [
        ({"action": "publish"}, "'create' (with app)"),
        ({"action": "create"}, "needs app"),
        ({"action": "create", "app": "My App"}, "REQUEST_MALFORMED"),
        ({"action": "create", "app": APP}, "NAME_TAKEN"),
        ({"action": "set", "app": APP}, "needs at least one of auth, repository, build"),
        ({"action": "set", "app": APP, "build": {"command": 1}}, "build.command"),
        ({"action": "show", "app": APP, "build": {"a": 1}}, "does not take build"),
    ],
    "limits": [
        ({"action": "clear", "app": APP}, "'show' (with app)"),
        ({"action": "set", "app": APP}, "needs at least one of dailyEuro"),
        ({"action": "set", "app": APP, "dailyEuro": "1000"}, "allows at most"),
        ({"action": "set", "app": APP, "dailyEuro": 1}, "dailyEuro"),
    ],
    "delivery": [
        ({"action": "rotate"}, "'list', 'show'"),
        ({"action": "redeliver"}, "needs id"),
        ({"action": "redeliver_failed", "since": 5}, "needs since"),
        ({"action": "redeliver_failed", "since": "lately"}, "since: "),
        ({"action": "list", "outcome": "lost"}, "outcome must be"),
        ({"action": "show", "id": "evt_none"}, "NOT_FOUND"),
    ],
    "deploy": [
        ({"action": "delete"}, "'list', 'show'"),
        ({"action": "show"}, "needs id"),
        ({"action": "rollback", "id": "dep_1"}, "needs app"),
        ({"action": "cancel", "app": "x", "id": "dep_1"}, "does not take app"),
        ({"action": "show", "id": "dep_none"}, "NOT_FOUND"),
    ],
    "env": [
        ({"action": "show", "app": APP}, "'list' (with app)"),
        *[
            (
                {"action": "set", "app": APP, "variables": given},
                'action \'set\' needs variables, such as {"NAME": "value"}.',
            )
            for given in ("", {}, ["A"], "A=1")
        ],
        ({"action": "unset", "app": APP}, '["NAME"]'),
        *[
            ({"action": "set", "app": APP, "variables": given}, "REQUEST_MALFORMED")
            for given in ({"a-b": "x"}, {"PORT": "1"}, {"A": 1})
        ],
        ({"action": "list", "app": "none-of-mine"}, "NOT_FOUND"),
    ],
    "hook": [
        ({}, "action must be 'create' (with app and name), 'list', or 'revoke' (with id)."),
        ({"action": "delete"}, "action must be"),
        ({"action": ["list"]}, "action must be"),
        ({"action": "create", "name": "CI"}, "action 'create' needs app: the app's name."),
        ({"action": "create", "app": "shop", "name": "  "}, "action 'create' needs name: a label for the hook"),
        ({"action": "create", "app": 7, "name": "CI"}, "action 'create' needs app"),
        (
            {"action": "create", "app": "a", "name": "CI", "id": "hook_1"},
            "'create' does not take id; leave it out.",
        ),
        ({"action": "list", "app": "shop", "name": "CI"}, "action 'list' does not take app or name; leave it out."),
        ({"action": "revoke", "hook_id": "hook_1"}, "action 'revoke' needs id: the hook's id, from 'list'."),
        ({"action": "create", "app": "nobodys", "name": "CI"}, "no such app in this account"),
        ({"action": "revoke", "id": "hook_1"}, "no such hook in this account"),
        ({"action": "revoke", "id": "../webhook"}, "no such hook in this account"),
    ],
    "members": [
        ({"action": "add"}, "'list', 'invite' (with email and role)"),
        ({"action": "remove"}, "needs email"),
        ({"action": "invite", "email": EMAIL, "role": "admin"}, "role must be one of owner, developer, viewer"),
        ({"action": "invite", "email": "nobody", "role": "viewer"}, "REQUEST_MALFORMED"),
        ({"action": "remove", "email": "nobody"}, "REQUEST_MALFORMED"),
        ({"action": "remove", "email": EMAIL}, "NOT_FOUND"),
    ],
}


async def test_errors_say_how_to_correct_the_call(connect: Connect, hosted: App) -> None:
    async with connect(hosted.gateway.address, hosted.account.key) as client:
        for tool, calls in REFUSED.items():
            for arguments, words in calls:
                given = {name: hosted.name if value == APP else value for name, value in arguments.items()}
                assert words in await refused(client, f"service_{tool}", **given), (tool, arguments)
    assert {each["by"] for each in (await hosted.account.get("/account/audit")).json()} == {"operator"}
