"""The agent tool `service_app`."""

from typing import Annotated, Any

import msgspec

from gateway.accounts.pacing import leave_lane
from gateway.api.apps import (
    AppChange,
    NewApp,
    apply_change,
    delete_own_app,
    register_app,
    view_app_details,
    view_apps,
    view_settings,
)
from gateway.api.bodies import decode_body
from gateway.mcp.tools import AgentTool, AppName, Arg, read_fields

MAX_FINDINGS = 50  # the most urgent ones
RESET = ". null resets it; leave it out to keep it"


class AppTool(AgentTool):
    """Create, list, show, change or delete apps. 'show' has health, settings, security findings and crashes."""

    name, title = "service_app", "Apps"

    async def create(
        self, app: Annotated[str, Arg("the new app's name, the first part of its address")]
    ) -> dict[str, Any]:
        """Create the app `app`, a name of lower-case letters, digits and hyphens."""
        new = decode_body(msgspec.json.encode({"name": app}), NewApp)
        parts = self.services
        created = await register_app(self.account, new.name, parts.settings, parts.store, parts.app_changes)
        return {"app": created, "note": "Publish it with service_publish."}

    async def list(self) -> dict[str, Any]:
        """List all apps, with status and health."""
        apps = await self.services.registry.list_apps(self.account.id)
        return {"apps": await view_apps(self.account, apps, self.services.settings, self.services.store)}

    async def show(self, app: AppName) -> dict[str, Any]:
        """Show one `app`, with its settings, certificate, health history, open security findings and latest crashes."""
        found, parts = await self.app(app), self.services
        details = await view_app_details(self.account, found, parts.settings, parts.store, parts.deploys)
        view: dict[str, Any] = msgspec.to_builtins(details)
        findings, crashes = await parts.findings.find_open(found), await parts.crashes.list(found)
        more = {"settings": view_settings(found), "findings": findings[:MAX_FINDINGS], "crashes": crashes}
        return {"app": view | more}

    async def set(
        self,
        app: AppName,
        auth: Annotated[
            Any,
            Arg(
                "how tokens of the app's users are verified",
                ["object", "null"],
                hint=', such as {"kind": "jwks", "url": "/api/auth/jwks"}, {"kind": "backend", "url": "https://…"} '
                'or {"kind": "secret", "secret": "…"}' + RESET,
            ),
        ] = "",
        repository: Annotated[
            Any,
            Arg(
                "the repository that is built",
                ["object", "null"],
                hint=', such as {"url": "https://…", "branch": "main"}' + RESET,
            ),
        ] = "",
        build: Annotated[
            Any,
            Arg(
                "how the app is built and started",
                ["object", "null"],
                hint=', such as {"command": "npm ci && npm run build", "output": "dist"}, or with "start", the command '
                "of its backend. Applies from the next deploy on" + RESET,
            ),
        ] = "",
    ) -> dict[str, Any]:
        """Change `auth`, `repository` or `build` of `app`."""
        leave_lane(self.scope["state"])  # a slow backend must not delay the account's other requests
        change = read_fields({"auth": auth, "repository": repository, "build": build}, AppChange)
        found, parts = await self.app(app), self.services
        changed = await apply_change(
            self.account, found, change, parts.settings, parts.vault, parts.registry, parts.app_changes, parts.users
        )
        return {"settings": changed}

    async def delete(self, app: AppName) -> dict[str, Any]:
        """Delete `app` with its hooks, variables and sources, which cannot be undone."""
        await delete_own_app(await self.app(app), self.services.app_changes, self.services.removal)
        return {"deleted": app}
