"""The agent tool `service_deploy`: lists and shows deploys, goes back to an earlier release, cancels a deploy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.accounts.records import Account
from gateway.api.deploys import DeployView, require_deploy, require_own_app
from gateway.errors import ServiceError
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


# Accepts any value: `parse_arguments` refuses wrong ones with messages that agents can act on.
ANYTHING = PlainValidator(lambda value: value)
Action = Annotated[
    str,
    ANYTHING,
    WithJsonSchema(
        {
            "type": "string",
            "enum": list(ACTIONS),
            "description": "list: the newest deploys, of all apps or of `app`. show: the deploy with this `id`, and "
            "the end of its log. rollback: serve an earlier release of `app` again, the one of `id` or the one before. "
            "cancel: end the deploy with this `id`, if it is queued or building.",
        }
    ),
]
AppName = Annotated[
    str, ANYTHING, WithJsonSchema({"type": "string", "description": "For list and rollback: the app's name."})
]
DeployId = Annotated[
    str,
    ANYTHING,
    WithJsonSchema({"type": "string", "description": "For show, cancel and rollback: the deploy's id."}),
]


def parse_arguments(action: Any, given: Mapping[str, Any]) -> list[str]:
    """Returns the action's arguments, in order. Raises ToolError, which says how to correct the call."""
    if not isinstance(action, str) or action not in ACTIONS:
        raise ToolError(CHOICES)
    takes = ACTIONS[action]
    for name, meaning in takes.items():
        optional = (action, name) in OPTIONAL and given[name] in ("", None)
        if not optional and (not isinstance(given[name], str) or not given[name].strip()):
            raise ToolError(f"action '{action}' needs {name}: {meaning}.")
    surplus = [name for name, value in given.items() if name not in takes and value not in ("", None)]
    if surplus:
        raise ToolError(f"action '{action}' takes no {' and no '.join(surplus)}; leave it out.")
    return [(given[name] or "").strip() for name in takes]


async def perform(deploys: AccountDeploys, action: str, arguments: list[str]) -> dict[str, Any]:
    match action:
        case "list":
            return {"deploys": await deploys.list(*arguments)}
        case "show":
            deploy = await deploys.show(*arguments)
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
        arguments = parse_arguments(action, {"app": app, "id": id})
        try:
            return await perform(deploys_of(context), action, arguments)
        except ServiceError as error:
            raise ToolError(f"{error.message} ({error.code})") from None

    tool = Tool.from_function(
        service_deploy,
        title="Deploys",
        annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False),
        structured_output=True,
    )
    tool.parameters["required"] = ["action"]
    return tool


class LocalDeploys:
    """The deploys of an account, in this process."""

    def __init__(self, gateway: Gateway, account: Account) -> None:
        self._gateway, self._account = gateway, account

    async def list(self, app: str) -> list[dict[str, Any]]:
        deploys = await self._gateway.deploys.list(self._account.id, app or None, LISTED)
        return [msgspec.to_builtins(DeployView.of(deploy)) for deploy in deploys]

    async def show(self, deploy_id: str) -> dict[str, Any]:
        deploy = await require_deploy(deploy_id, self._account, self._gateway)
        shown: dict[str, Any] = msgspec.to_builtins(DeployView.of(deploy))
        waits = await self._gateway.deploys.positions_of([deploy])
        return {**shown, **waits.get(deploy.id, {}), "log": await self._gateway.deploys.read_log(deploy)}

    async def roll_back(self, app: str, deploy_id: str) -> str:
        found = await require_own_app(app, self._account, self._gateway)
        return await self._gateway.steering.roll_back(found, deploy_id or None)

    async def cancel(self, deploy_id: str) -> dict[str, Any]:
        deploy = await require_deploy(deploy_id, self._account, self._gateway)
        canceled: dict[str, Any] = msgspec.to_builtins(DeployView.of(await self._gateway.steering.cancel(deploy)))
        return canceled
