"""The agent tool `service_hook`: creates, lists and revokes deploy hooks."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool

from gateway.accounts.records import Account
from gateway.mcp.tools import ANYTHING, account_of, answer, make_tool, parse_arguments, text
from gateway.services import Services

# The arguments of each action, with their meaning.
ACTIONS: dict[str, dict[str, str]] = {
    "create": {"app": "the app's name", "name": "a label for the hook, up to 100 characters"},
    "list": {},
    "revoke": {"id": "the hook's id, from 'list'"},
}
CHOICES = "action must be 'create' (with app and name), 'list', or 'revoke' (with id)."

Action = Annotated[
    str,
    ANYTHING,
    text(
        "create: create a hook for `app`, with the label `name`. list: list all hooks. "
        "revoke: revoke the hook with this `id`.",
        enum=list(ACTIONS),
    ),
]
AppName = Annotated[str, ANYTHING, text("For create: the app's name.")]
HookName = Annotated[str, ANYTHING, text("For create: a label that says what the hook is for.", maxLength=100)]
HookId = Annotated[str, ANYTHING, text("For revoke: the hook's id, from list.")]


async def perform(services: Services, account: Account, action: str, arguments: list[str]) -> dict[str, Any]:
    match action:
        case "create":
            created = await services.hooks.create(account.id, *arguments)
            note = "The URL is shown only once. A POST to it, without a body, deploys the app."
            return {"hook": created, "note": note}
        case "list":
            return {"hooks": await services.hooks.list(account.id)}
        case _:
            await services.hooks.revoke(account.id, *arguments)
            return {"revoked": arguments[0], "note": "Its URL now answers 404."}


def hook_tool(services: Services) -> Tool:
    async def service_hook(
        context: Context[Any], action: Action = "", app: AppName = "", name: HookName = "", id: HookId = ""
    ) -> dict[str, Any]:
        """Create, list or revoke deploy hooks. A hook is a secret URL; a POST to it rebuilds one app."""
        arguments = parse_arguments(action, {"app": app, "name": name, "id": id}, ACTIONS, CHOICES)
        return await answer(perform(services, account_of(context), action, arguments))

    return make_tool(service_hook, "Deploy hooks")
