"""The agent tool `service_env`. No answer has a value."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver.exceptions import ToolError

from gateway.api.bodies import decode_map
from gateway.mcp.tools import AgentTool, AppName, Arg

NOTE = "Applies from the next deploy on."
Variables = Annotated[
    Any,
    Arg(
        "names with values to set",
        ["object", "array"],
        hint=', such as {"DATABASE_URL": "postgres://…"}, or a list of names to unset',
    ),
]


class EnvironmentTool(AgentTool):
    """List, set or remove an app's environment variables. Values are never shown."""

    name, title = "service_env", "Environment variables"

    async def list(self, app: AppName) -> dict[str, Any]:
        """List the names of the variables of `app`."""
        return {"variables": await self.services.environments.list_variables(await self.app(app))}

    async def set(self, app: AppName, variables: Variables) -> dict[str, Any]:
        """Set `variables`, from the next deploy on."""
        if isinstance(variables, dict) and variables:
            return await self._change(app, decode_map(msgspec.json.encode(variables), str))
        raise ToolError('action \'set\' needs variables, such as {"NAME": "value"}.')

    async def unset(self, app: AppName, variables: Variables) -> dict[str, Any]:
        """Remove `variables`, from the next deploy on."""
        names = [variables] if variables and isinstance(variables, str) else variables
        if isinstance(names, list | dict) and names:
            return await self._change(app, dict.fromkeys(map(str, names)))
        raise ToolError("action 'unset' needs variables, such as [\"NAME\"].")

    async def _change(self, name: str, changes: Mapping[str, str | None]) -> dict[str, Any]:
        app = await self.app(name)
        await self.services.environments.change_variables(app, changes)
        return {"variables": await self.services.environments.list_variables(app), "note": NOTE}
