"""The agent tool `service_deploy`."""

from typing import Annotated, Any

import msgspec

from gateway.api.deploys import DeployView, view_deploys, view_with_log
from gateway.mcp.tools import AgentTool, AppName, Arg

LISTED_DEPLOYS = 20
LOG_CHARACTERS = 16_000  # the end of a log explains a failure
DeployId = Annotated[str, Arg("the deploy's id, from 'list'")]


class DeployTool(AgentTool):
    """List and show deploys, roll back to an earlier release, or cancel a deploy."""

    name, title = "service_deploy", "Deploys"

    async def list(self, app: AppName = "") -> dict[str, Any]:
        """List the newest deploys, of all apps or of `app`."""
        deploys = await self.services.deploys.list(self.account.id, app or None, LISTED_DEPLOYS)
        return {"deploys": await view_deploys(deploys, self.services.deploys)}

    async def show(self, id: DeployId) -> dict[str, Any]:
        """Show the deploy with this `id`, and the end of its log."""
        view = msgspec.to_builtins(await view_with_log(await self.deploy(id), self.services.deploys))
        view.pop("logTimes", None)
        return {"deploy": {**view, "log": view.get("log", "")[-LOG_CHARACTERS:]}}

    async def rollback(self, app: AppName, id: DeployId = "") -> dict[str, Any]:
        """Serve an earlier release of `app` again: the release of deploy `id`, or the previous one."""
        note = "A new deploy serves the earlier release; 'show' it until its state is 'live' or 'failed'."
        queued = await self.services.deploy_actions.roll_back(await self.app(app), id or None)
        return {"deployId": queued, "note": note}

    async def cancel(self, id: DeployId) -> dict[str, Any]:
        """Cancel the deploy with this `id`, if it is queued or building."""
        return {"deploy": DeployView.of(await self.services.deploy_actions.cancel(await self.deploy(id)))}
