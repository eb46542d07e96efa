"""The agent tool `service_hook`."""

from typing import Annotated, Any

from gateway.mcp.tools import AgentTool, AppName, Arg


class HookTool(AgentTool):
    """Create, list or revoke deploy hooks. A hook is a secret URL; a POST to it rebuilds one app."""

    name, title = "service_hook", "Deploy hooks"

    async def create(
        self, app: AppName, name: Annotated[str, Arg("a label for the hook, up to 100 characters", maxLength=100)]
    ) -> dict[str, Any]:
        """Create a hook for `app`, with the label `name`."""
        created = await self.services.hooks.create(self.account.id, app, name)
        note = "The URL is shown only once. A POST to it, without a body, deploys the app."
        return {"hook": created, "note": note}

    async def list(self) -> dict[str, Any]:
        """List all hooks."""
        return {"hooks": await self.services.hooks.list(self.account.id)}

    async def revoke(self, id: Annotated[str, Arg("the hook's id, from 'list'")]) -> dict[str, Any]:
        """Revoke the hook with this `id`."""
        await self.services.hooks.revoke(self.account.id, id)
        return {"revoked": id, "note": "Its URL now answers 404."}
