"""The agent tool `service_limits`: the limits of an app and of its users."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.api.apps import LimitsChange, change_limits, show_limits, show_spend
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, parse_arguments, read_fields, text, value
from gateway.services import Services

# The arguments of each action, with their meaning.
FIELDS = {
    "dailyEuro": "the app's euro per UTC day",
    "userDailyEuro": "each user's euro per UTC day",
    "requestsPerMinute": "the app's requests per minute",
    "userRequestsPerMinute": "each user's requests per minute",
}
ACTIONS: dict[str, dict[str, str]] = {
    "show": {"app": "the app's name"},
    "set": {"app": "the app's name"} | FIELDS,
}
CHOICES = "action must be 'show' (with app) or 'set' (with app and limits)."

Action = Annotated[
    str,
    ANYTHING,
    text(
        "show: show the limits of `app`, the widest that can be set, and its spend of today in nano-euro. set: change "
        "the limits that are named.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("The app's name.")]
CLEAR = "0 refuses all requests, null clears the limit; leave it out to keep it."
AppEuro = Annotated[
    Any, ANYTHING, value(["string", "null"], f'For set: euro per UTC day of the app, as "0.50". {CLEAR}')
]
UserEuro = Annotated[Any, ANYTHING, value(["string", "null"], f"For set: euro per UTC day of each user. {CLEAR}")]
AppRate = Annotated[Any, ANYTHING, value(["integer", "null"], f"For set: requests per minute of the app. {CLEAR}")]
UserRate = Annotated[Any, ANYTHING, value(["integer", "null"], f"For set: requests per minute of each user. {CLEAR}")]


async def perform(services: Services, account: Account, action: str, arguments: list[Any]) -> dict[str, Any]:
    name = arguments[0]
    if action == "show":
        limits = await show_limits.fn(account=account, app=name, registry=services.registry)
        return {
            "limits": limits,
            "spend": await show_spend.fn(
                account=account, app=name, settings=services.settings, store=services.store, registry=services.registry
            ),
        }
    change = read_fields(dict(zip(FIELDS, arguments[1:], strict=True)), LimitsChange)
    return {
        "limits": await change_limits.fn(
            account=account, app=name, data=change, settings=services.settings, registry=services.registry
        )
    }


def limits_tool(services: Services) -> Tool:
    async def service_limits(
        context: Context[Any],
        action: Action = "",
        app: AppName = "",
        dailyEuro: AppEuro = "",
        userDailyEuro: UserEuro = "",
        requestsPerMinute: AppRate = "",
        userRequestsPerMinute: UserRate = "",
    ) -> dict[str, Any]:
        """Show or change what an app and its users may spend and request. The account's own limits stay in force."""
        given = {
            "app": app,
            "dailyEuro": dailyEuro,
            "userDailyEuro": userDailyEuro,
            "requestsPerMinute": requestsPerMinute,
            "userRequestsPerMinute": userRequestsPerMinute,
        }
        arguments = parse_arguments(action, given, ACTIONS, CHOICES, values=FIELDS)
        return await answer(perform(services, account_of(context), action, arguments))

    return make_tool(service_limits, "Limits")
