"""The agent tool `service_hook`, which manages deploy hooks over MCP, and all agent tools for the HTTP endpoint `/mcp`.

`gateway/mcp/endpoint.py` is that endpoint; it calls the gateway itself, for the account whose API key the request
carries. `gateway/cli/mcp.py` serves the same tools over standard input and output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import msgspec
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.transport_security import TransportSecuritySettings

from gateway.accounts.records import Account
from gateway.deploys.hooks import Hooks
from gateway.mcp.apps import AccountApps, LocalApps, app_tool
from gateway.mcp.deliveries import AccountDeliveries, LocalDeliveries, delivery_tool
from gateway.mcp.deploys import AccountDeploys, LocalDeploys, deploy_tool
from gateway.mcp.tools import ANYTHING, answer, make_tool, parse_arguments, text
from gateway.process import Gateway

MESSAGE_BYTES = 65_536
ACCOUNT = "capsule.account"  # in the request's scope

# The arguments of each action, with their meaning.
ACTIONS: dict[str, dict[str, str]] = {
    "create": {"app": "the app's name", "name": "what the hook is for, up to 100 characters"},
    "list": {},
    "revoke": {"id": "the hook's id, as 'list' shows it"},
}
CHOICES = "action must be 'create' (with app and name), 'list', or 'revoke' (with id)."
INSTRUCTIONS = (
    "Deploy hooks are secret URLs: a POST to one rebuilds its app. Whoever has the URL can deploy the app, and it "
    "shows only once, when the hook is created; hand it to the user and do not repeat it. A rollback serves an earlier "
    "release to the app's visitors: ask the user first. A redelivery sends an event to the user's receiver once more."
)


# -- the tool ------------------------------------------------------------------------------------------------


class AccountHooks(Protocol):
    """The hooks of one account. Raises ServiceError or ToolError."""

    async def create(self, app: str, name: str) -> dict[str, Any]: ...
    async def list(self) -> list[dict[str, Any]]: ...
    async def revoke(self, hook_id: str) -> None: ...


Action = Annotated[
    str,
    ANYTHING,
    text(
        "create: a hook for `app`, called `name`. list: all hooks. revoke: the hook with this `id`.", enum=list(ACTIONS)
    ),
]
AppName = Annotated[str, ANYTHING, text("For create: the app's name.")]
HookName = Annotated[str, ANYTHING, text("For create: what the hook is for.", maxLength=100)]
HookId = Annotated[str, ANYTHING, text("For revoke: the hook's id, as list shows it.")]


async def perform(hooks: AccountHooks, action: str, arguments: list[str]) -> dict[str, Any]:
    match action:
        case "create":
            note = "The URL shows only this once. A POST to it, without a body, deploys the app."
            return {"hook": await hooks.create(*arguments), "note": note}
        case "list":
            return {"hooks": await hooks.list()}
        case _:
            await hooks.revoke(*arguments)
            return {"revoked": arguments[0], "note": "Its URL answers 404 from now on."}


def tool_server(
    hooks_of: Callable[[Context[Any]], AccountHooks],
    deploys_of: Callable[[Context[Any]], AccountDeploys],
    apps_of: Callable[[Context[Any]], AccountApps],
    deliveries_of: Callable[[Context[Any]], AccountDeliveries],
) -> MCPServer:
    """The functions return what belongs to the caller's account."""

    async def service_hook(
        context: Context[Any], action: Action = "", app: AppName = "", name: HookName = "", id: HookId = ""
    ) -> dict[str, Any]:
        """Create, list or revoke deploy hooks. A hook is a secret URL; a POST to it rebuilds one app."""
        arguments = parse_arguments(action, {"app": app, "name": name, "id": id}, ACTIONS, CHOICES)
        return await answer(perform(hooks_of(context), action, arguments))

    return MCPServer(
        "capsule",
        title="Capsule",
        instructions=INSTRUCTIONS,
        version=version("capsule-gateway"),
        tools=[
            make_tool(service_hook, "Deploy hooks"),
            deploy_tool(deploys_of),
            app_tool(apps_of),
            delivery_tool(deliveries_of),
        ],
        log_level="ERROR",
        subscriptions=False,
    )


# -- streamable HTTP -----------------------------------------------------------------------------------------


class LocalHooks:
    """The hooks of an account, in this process."""

    def __init__(self, hooks: Hooks, account_id: str) -> None:
        self._hooks, self._account_id = hooks, account_id

    async def create(self, app: str, name: str) -> dict[str, Any]:
        created: dict[str, Any] = msgspec.to_builtins(await self._hooks.create(self._account_id, app, name))
        return created

    async def list(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(hook) for hook in await self._hooks.list(self._account_id)]

    async def revoke(self, hook_id: str) -> None:
        await self._hooks.revoke(self._account_id, hook_id)


class AgentSessions:
    """The tools over streamable HTTP. They keep no sessions, so any process can answer any request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        server = tool_server(self._hooks_of, self._deploys_of, self._apps_of, self._deliveries_of)
        # Plain JSON, because the SDK logs each chunk of a streamed answer, and a hook's URL is a secret.
        server.streamable_http_app(
            stateless_http=True,
            json_response=True,
            max_request_body_size=MESSAGE_BYTES,
            transport_security=own_host_only(gateway.settings.base_url),
        )
        self._manager = server.session_manager

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._manager.run()

    # `Any`, because Litestar and the SDK have different types for ASGI.
    async def answer(self, account: Account, scope: Any, receive: Any, send: Any) -> None:
        await self._manager.handle_request({**scope, ACCOUNT: account}, receive, send)

    def _hooks_of(self, context: Context[Any]) -> LocalHooks:
        return LocalHooks(self._gateway.hooks, _account(context).id)

    def _deploys_of(self, context: Context[Any]) -> LocalDeploys:
        return LocalDeploys(self._gateway, _account(context))

    def _apps_of(self, context: Context[Any]) -> LocalApps:
        return LocalApps(self._gateway, _account(context))

    def _deliveries_of(self, context: Context[Any]) -> LocalDeliveries:
        return LocalDeliveries(self._gateway, _account(context))


def _account(context: Context[Any]) -> Account:
    request = context.request_context.request
    assert request is not None
    account: Account = request.scope[ACCOUNT]
    return account


def own_host_only(base_url: str) -> TransportSecuritySettings:
    """Protects against DNS rebinding and against other sites' pages."""
    parts = urlsplit(base_url)
    # Any port, because proxies leave it out or write their own. The name alone tells of another site.
    name = parts.netloc.removesuffix(f":{parts.port}")
    return TransportSecuritySettings(
        allowed_hosts=[name, f"{name}:*"], allowed_origins=[f"{parts.scheme}://{parts.netloc}"]
    )
