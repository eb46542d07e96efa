"""The agent tool `service_usage`: the account's requests, tokens and money by day."""

from __future__ import annotations

from typing import Annotated, Any, cast, get_args

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, read_number, text, value
from gateway.services import Services
from gateway.telemetry.usage_reports import PERIOD_SECONDS, Group, read_usage

DEFAULT_DAYS, MAX_DAYS = 7, 400
MAX_ROWS = 500  # the newest ones
GROUPS: tuple[str, ...] = get_args(Group)

Days = Annotated[
    Any,
    ANYTHING,
    value("integer", "The number of days, including today (UTC). By default 7.", minimum=1, maximum=MAX_DAYS),
]
By = Annotated[str, ANYTHING, text("app or model: a row for each. By default none.", enum=["", *GROUPS])]


async def read_days(services: Services, account: Account, days: int, group: Group) -> dict[str, Any]:
    now: int = (await services.store.client.time())[0]
    day = PERIOD_SECONDS["day"]
    start = now // day * day - (days - 1) * day
    usage = read_usage(services.store, account.id, "day", group, start=start, end=now + 1, now=now)
    rows = [row async for part in usage for row in part]
    return {"rows": rows[-MAX_ROWS:], "note": "Money is in nano-euro. Days without requests are left out."}


def usage_tool(services: Services) -> Tool:
    async def service_usage(context: Context[Any], days: Days = "", by: By = "") -> dict[str, Any]:
        """Show requests, refused requests, tokens and money by day."""
        group = by or "none"
        if group not in GROUPS:
            raise ToolError(f"by must be one of {', '.join(GROUPS)}.")
        count = read_number("days", days, DEFAULT_DAYS, MAX_DAYS)
        return await answer(read_days(services, account_of(context), count, cast(Group, group)))

    return make_tool(service_usage, "Usage", read_only=True, required=[])
