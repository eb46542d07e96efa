"""The agent tool `service_deploy`: lists and shows deploys, rolls back to an earlier release, cancels a deploy."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.api.deploys import DeployView, view_deploys, view_with_log
from gateway.api.subjects import require_deploy, require_own_app
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, parse_arguments, text
from gateway.services import Services

LISTED_DEPLOYS = 20
LOG_CHARACTERS = 16_000  # the end of a log explains a failure

# The arguments of each action, with their meaning. OPTIONAL holds the arguments that an action does not need.
ACTIONS: dict[str, dict[str, str]] = {
    "list": {"app": "the app's name"},
    "show": {"id": "the deploy's id, from 'list'"},
    "rollback": {"app": "the app's name", "id": "the id of the deploy to roll back to, from 'list'"},
    "cancel": {"id": "the deploy's id, from 'list'"},
}
OPTIONAL = {("list", "app"), ("rollback", "id")}
CHOICES = "action must be 'list', 'show' (with id), 'rollback' (with app), or 'cancel' (with id)."

Action = Annotated[
    str,
    ANYTHING,
    text(
        "list: list the newest deploys, of all apps or of `app`. "
        "show: show the deploy with this `id`, and the end of its log. "
        "rollback: serve an earlier release of `app` again: the release of deploy `id`, or the previous one. "
        "cancel: cancel the deploy with this `id`, if it is queued or building.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("For list and rollback: the app's name.")]
DeployId = Annotated[str, ANYTHING, text("For show, cancel and rollback: the deploy's id.")]


async def perform(services: Services, account: Account, action: str, arguments: list[str]) -> dict[str, Any]:
    match action:
        case "list":
            deploys = await services.deploys.list(account.id, arguments[0] or None, LISTED_DEPLOYS)
            return {"deploys": await view_deploys(deploys, services.deploys)}
        case "show":
            found = await require_deploy(arguments[0], account, services.deploys)
            view = msgspec.to_builtins(await view_with_log(found, services.deploys))
            view.pop("logTimes", None)
            return {"deploy": {**view, "log": view.get("log", "")[-LOG_CHARACTERS:]}}
        case "rollback":
            app = await require_own_app(arguments[0], account, services.registry)
            note = "A new deploy serves the earlier release; 'show' it until its state is 'live' or 'failed'."
            return {"deployId": await services.deploy_actions.roll_back(app, arguments[1] or None), "note": note}
        case _:
            deploy = await services.deploy_actions.cancel(await require_deploy(arguments[0], account, services.deploys))
            return {"deploy": DeployView.of(deploy)}


def deploy_tool(services: Services) -> Tool:
    async def service_deploy(
        context: Context[Any], action: Action = "", app: AppName = "", id: DeployId = ""
    ) -> dict[str, Any]:
        """List and show deploys, roll back to an earlier release, or cancel a deploy."""
        arguments = parse_arguments(action, {"app": app, "id": id}, ACTIONS, CHOICES, OPTIONAL)
        return await answer(perform(services, account_of(context), action, arguments))

    return make_tool(service_deploy, "Deploys")
