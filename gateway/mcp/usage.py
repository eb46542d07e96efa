"""The agent tool `service_usage`."""

from typing import Annotated, Any, cast, get_args

from mcp.server.mcpserver.exceptions import ToolError

from gateway.mcp.tools import AgentTool, Arg, read_number
from gateway.telemetry.usage_reports import PERIOD_SECONDS, Group, read_usage

DEFAULT_DAYS, MAX_DAYS = 7, 400
MAX_ROWS = 500  # the newest ones
GROUPS: tuple[str, ...] = get_args(Group)
Days = Annotated[
    Any, Arg("the number of days, including today (UTC). By default 7", "integer", minimum=1, maximum=MAX_DAYS)
]
By = Annotated[str, Arg("a row for each app or model. By default none", enum=["", *GROUPS])]


class UsageTool(AgentTool):
    """Show requests, refused requests, tokens and money by day."""

    name, title, read_only = "service_usage", "Usage", True

    async def run(self, days: Days = "", by: By = "none") -> dict[str, Any]:
        if by not in GROUPS:
            raise ToolError(f"by must be one of {', '.join(GROUPS)}.")
        count = read_number("days", days, DEFAULT_DAYS, MAX_DAYS)
        now: int = (await self.services.store.client.time())[0]
        day = PERIOD_SECONDS["day"]
        start = now // day * day - (count - 1) * day
        store, group = self.services.store, cast(Group, by)
        usage = read_usage(store, self.account.id, "day", group, start=start, end=now + 1, now=now)
        rows = [row async for part in usage for row in part]
        return {"rows": rows[-MAX_ROWS:], "note": "Money is in nano-euro. Days without requests are left out."}
