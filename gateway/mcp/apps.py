"""The agent tools `service_app`, `service_limits` and `service_usage`: apps, what they may use, and what they used."""

from typing import Annotated, get_args

import msgspec

from gateway.accounts.app_limits import LimitsChange
from gateway.accounts.pacing import leave_lane
from gateway.api.bodies import decode_body
from gateway.inference.spend.limits import LimitsView
from gateway.mcp.tools import AgentTool, AppName, Arg, Result
from gateway.operations.apps import AppChange, AppSettings, NewApp
from gateway.telemetry.usage_reports import PERIOD_SECONDS, Group, read_usage

MAX_FINDINGS = 50  # the most urgent ones


class AppTool(AgentTool):
    """Create, list, show, change or delete apps. 'show' has health, settings, security findings and crashes."""

    name, title = "service_app", "Apps"

    async def create(self, app: AppName) -> Result:
        """Create the app `app`, a name of lower-case letters, digits and hyphens."""
        new = decode_body(msgspec.json.encode({"name": app}), NewApp)
        created = await self.services.apps.create(self.account, new.name)
        return {"app": created, "note": "Publish it with service_publish."}

    async def list(self) -> Result:
        """List all apps, with status and health."""
        return {"apps": await self.services.apps.list(self.access)}

    async def show(self, app: AppName) -> Result:
        """Show one `app`, with its settings, certificate, health history, open security findings and latest crashes."""
        found, parts = await self._find_app(app), self.services
        details = await parts.apps.show(self.account, found)
        findings, crashes = await parts.findings.find_open(found), await parts.crashes.list(found)
        more = {"settings": AppSettings.of(found), "findings": findings[:MAX_FINDINGS], "crashes": crashes}
        return {"app": msgspec.to_builtins(details) | more}

    async def set(self, app: AppName, change: AppChange) -> Result:
        """Change `auth`, `repository` or `build` of `app`."""
        leave_lane(self.scope["state"])  # a slow backend must not delay the account's other requests
        return {"settings": await self.services.apps.change(await self._find_app(app), change)}

    async def delete(self, app: AppName) -> Result:
        """Delete `app` with its hooks, variables and sources, which cannot be undone."""
        await self.services.apps.delete(await self._find_app(app))
        return {"deleted": app}


class LimitsTool(AgentTool):
    """Show or change what an app and its users may spend and request. The account's own limits stay in force."""

    name, title = "service_limits", "Limits"

    async def show(self, app: AppName) -> Result:
        """Show the limits of `app`, the widest that can be set, and its spend of today in nano-euro."""
        found = await self._find_app(app)
        spend = await self.services.apps.read_spend(self.account, found)
        return {"limits": LimitsView.of(found.limits), "spend": spend}

    async def set(self, app: AppName, change: LimitsChange) -> Result:
        """Change the limits that are named."""
        return {"limits": await self.services.apps.change_limits(self.account, await self._find_app(app), change)}


MAX_ROWS = 500  # the newest ones
Days = Annotated[int, Arg("the number of days, including today (UTC)", "integer", minimum=1, maximum=400)]
By = Annotated[Group, Arg("with app, model or provider, each has a row of its own", enum=["", *get_args(Group)])]


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
