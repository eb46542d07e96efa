"""The agent tool `service_deploy`: lists and shows deploys, goes back to an earlier release, cancels a deploy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.deploys.routes import DeployView, require_deploy, require_own_app, view_deploys, view_with_log
from gateway.mcp.tools import ANYTHING, answer, make_tool, parse_arguments, text
from gateway.process import Gateway

LISTED = 20  # deploys
LOG_CHARACTERS = 16_000  # the end of a log explains a failure

# The arguments of each action, with their meaning. An action may go without those in OPTIONAL.
ACTIONS: dict[str, dict[str, str]] = {
    "list": {"app": "the app's name"},
    "show": {"id": "the deploy's id, as 'list' shows it"},
    "rollback": {"app": "the app's name", "id": "the deploy to go back to, as 'list' shows it"},
    "cancel": {"id": "the deploy's id, as 'list' shows it"},
}
OPTIONAL = {("list", "app"), ("rollback", "id")}
CHOICES = "action must be 'list', 'show' (with id), 'rollback' (with app), or 'cancel' (with id)."


class AccountDeploys(Protocol):
    """The deploys of one account. Raises ServiceError or ToolError."""

    async def list(self, app: str) -> list[dict[str, Any]]: ...
    async def show(self, deploy_id: str) -> dict[str, Any]: ...
    async def roll_back(self, app: str, deploy_id: str) -> str: ...
    async def cancel(self, deploy_id: str) -> dict[str, Any]: ...


Action = Annotated[
    str,
    ANYTHING,
    text(
        "list: the newest deploys, of all apps or of `app`. show: the deploy with this `id`, and the end of its log. "
        "rollback: serve an earlier release of `app` again, the one of `id` or the one before. "
        "cancel: end the deploy with this `id`, if it is queued or building.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("For list and rollback: the app's name.")]
DeployId = Annotated[str, ANYTHING, text("For show, cancel and rollback: the deploy's id.")]


async def perform(deploys: AccountDeploys, action: str, arguments: list[str]) -> dict[str, Any]:
    match action:
        case "list":
            return {"deploys": await deploys.list(*arguments)}
        case "show":
            deploy = await deploys.show(*arguments)
            deploy.pop("logTimes", None)
            return {"deploy": {**deploy, "log": deploy.get("log", "")[-LOG_CHARACTERS:]}}
        case "rollback":
            note = "A new deploy serves the earlier release; 'show' it until its state is 'live' or 'failed'."
            return {"deployId": await deploys.roll_back(*arguments), "note": note}
        case _:
            return {"deploy": await deploys.cancel(*arguments)}


def deploy_tool(deploys_of: Callable[[Context[Any]], AccountDeploys]) -> Tool:
    """`deploys_of` returns the deploys of the caller's account."""

    async def service_deploy(
        context: Context[Any], action: Action = "", app: AppName = "", id: DeployId = ""
    ) -> dict[str, Any]:
        """List and show deploys, go back to an earlier release, or cancel a deploy."""
        arguments = parse_arguments(action, {"app": app, "id": id}, ACTIONS, CHOICES, OPTIONAL)
        return await answer(perform(deploys_of(context), action, arguments))

    return make_tool(service_deploy, "Deploys")


class LocalDeploys:
    """The deploys of an account, in this process."""

    def __init__(self, gateway: Gateway, account: Account) -> None:
        self._gateway, self._account = gateway, account

    async def list(self, app: str) -> list[dict[str, Any]]:
        deploys = await self._gateway.deploys.list(self._account.id, app or None, LISTED)
        return [msgspec.to_builtins(view) for view in await view_deploys(deploys, self._gateway)]

    async def show(self, deploy_id: str) -> dict[str, Any]:
        deploy = await require_deploy(deploy_id, self._account, self._gateway)
        shown: dict[str, Any] = msgspec.to_builtins(await view_with_log(deploy, self._gateway))
        return shown

    async def roll_back(self, app: str, deploy_id: str) -> str:
        found = await require_own_app(app, self._account, self._gateway)
        return await self._gateway.steering.roll_back(found, deploy_id or None)

    async def cancel(self, deploy_id: str) -> dict[str, Any]:
        deploy = await require_deploy(deploy_id, self._account, self._gateway)
        canceled: dict[str, Any] = msgspec.to_builtins(DeployView.of(await self._gateway.steering.cancel(deploy)))
        return canceled
