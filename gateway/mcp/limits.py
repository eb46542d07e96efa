"""The agent tool `service_limits`."""

from typing import Annotated, Any

from gateway.api.apps import LimitsChange, apply_limits, read_spend, view_limits
from gateway.mcp.tools import AgentTool, AppName, Arg, read_fields

CLEAR = ". 0 refuses all requests, null clears the limit; leave it out to keep it"


class LimitsTool(AgentTool):
    """Show or change what an app and its users may spend and request. The account's own limits stay in force."""

    name, title = "service_limits", "Limits"

    async def show(self, app: AppName) -> dict[str, Any]:
        """Show the limits of `app`, the widest that can be set, and its spend of today in nano-euro."""
        found = await self.app(app)
        spend = await read_spend(self.account, found, self.services.settings, self.services.store)
        return {"limits": view_limits(found), "spend": spend}

    async def set(
        self,
        app: AppName,
        dailyEuro: Annotated[Any, Arg('euro per UTC day of the app, as "0.50"', ["string", "null"], hint=CLEAR)] = "",
        userDailyEuro: Annotated[Any, Arg("euro per UTC day of each user", ["string", "null"], hint=CLEAR)] = "",
        requestsPerMinute: Annotated[Any, Arg("requests per minute of the app", ["integer", "null"], hint=CLEAR)] = "",
        userRequestsPerMinute: Annotated[
            Any, Arg("requests per minute of each user", ["integer", "null"], hint=CLEAR)
        ] = "",
    ) -> dict[str, Any]:
        """Change the limits that are named."""
        given = {
            "dailyEuro": dailyEuro,
            "userDailyEuro": userDailyEuro,
            "requestsPerMinute": requestsPerMinute,
            "userRequestsPerMinute": userRequestsPerMinute,
        }
        change = read_fields(given, LimitsChange)
        found = await self.app(app)
        return {
            "limits": await apply_limits(self.account, found, change, self.services.settings, self.services.registry)
        }
