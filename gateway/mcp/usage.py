"""The agent tool `service_usage`: the account's requests, tokens and money by day."""

from typing import Annotated, get_args

from gateway.mcp.tools import AgentTool, AppName, Arg, Result
from gateway.telemetry.usage_reports import PERIOD_SECONDS, Group, read_usage

MAX_ROWS = 500  # the newest ones

Days = Annotated[int, Arg("the number of days, including today (UTC)", "integer", minimum=1, maximum=400)]
By = Annotated[Group, Arg("with app or model, each has a row of its own", enum=["", *get_args(Group)])]


class UsageTool(AgentTool):
    """Show requests, refused requests, tokens and money by day."""

    name, title, read_only = "service_usage", "Usage", True

    async def show(self, days: Days = 7, by: By = "none", app: AppName = "") -> Result:
        """Show the last `days`, of all apps or of `app`."""
        now: int = (await self.services.store.client.time())[0]
        day = PERIOD_SECONDS["day"]
        start = now // day * day - (days - 1) * day
        usage = read_usage(
            self.services.store, self.account.id, "day", by, app=app or None, start=start, end=now + 1, now=now
        )
        rows = [row async for part in usage for row in part]
        return {"rows": rows[-MAX_ROWS:], "note": "Money is in nano-euro. Days without requests are left out."}
