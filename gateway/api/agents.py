"""The agent tool `service_hook`: deploy hooks, for agents that speak MCP.

One tool, over two transports. Over standard input and output (`capsule mcp`) it calls the service as the command line
does. At `/mcp` of the gateway it calls the gateway's own hooks, for the account whose API key the request carries; no
session is kept, so any process answers any request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from litestar import Request
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import PlainValidator, WithJsonSchema

from gateway.api.account import holder
from gateway.cli.service import Refused, Service, path
from gateway.deploys.hooks import Hooks
from gateway.errors import MethodNotAllowed, ServiceError
from gateway.process import Gateway

BODY_LIMIT = 65_536  # bytes of a message
ACCOUNT = "capsule.account"  # in the scope of a request

NEEDED: dict[str, dict[str, str]] = {
    "create": {"app": "the app's name", "name": "what the hook is for, up to 100 characters"},
    "list": {},
    "revoke": {"id": "the hook's id, as 'list' shows it"},
}
INSTRUCTIONS = (
    "Deploy hooks are secret URLs: a POST to one rebuilds its app. Whoever has the URL can deploy the app, and it "
    "shows only once, when the hook is created; hand it to the user and do not repeat it."
)


class AccountHooks(Protocol):
    """The hooks of one account. Raises ServiceError, Refused."""

    async def create(self, app: str, name: str) -> dict[str, Any]: ...
    async def list(self) -> list[dict[str, Any]]: ...
    async def revoke(self, hook_id: str) -> None: ...


# Any value is let through to `_checked`, whose words an agent can act on.
ANYTHING = PlainValidator(lambda value: value)
Action = Annotated[
    str,
    ANYTHING,
    WithJsonSchema(
        {
            "type": "string",
            "enum": list(NEEDED),
            "description": "create: a hook for `app`, called `name`. list: all hooks. revoke: the hook with this `id`.",
        }
    ),
]
AppName = Annotated[str, ANYTHING, WithJsonSchema({"type": "string", "description": "For create: the app's name."})]
HookName = Annotated[
    str,
    ANYTHING,
    WithJsonSchema({"type": "string", "maxLength": 100, "description": "For create: what the hook is for."}),
]
HookId = Annotated[
    str, ANYTHING, WithJsonSchema({"type": "string", "description": "For revoke: the hook's id, as list shows it."})
]


def _checked(action: Any, given: dict[str, Any]) -> list[str]:
    """The arguments of the action, in order. Raises ToolError with what to do."""
    if not isinstance(action, str) or action not in NEEDED:
        raise ToolError("action must be 'create' (with app and name), 'list', or 'revoke' (with id).")
    needed = NEEDED[action]
    for name, meaning in needed.items():
        if not isinstance(given[name], str) or not given[name].strip():
            raise ToolError(f"action '{action}' needs {name}: {meaning}.")
    surplus = [name for name, value in given.items() if name not in needed and value not in ("", None)]
    if surplus:
        raise ToolError(f"action '{action}' takes no {' and no '.join(surplus)}; leave it out.")
    return [given[name].strip() for name in needed]


def _server(hooks_of: Callable[[Context[Any]], AccountHooks]) -> MCPServer:
    async def service_hook(
        context: Context[Any], action: Action = "", app: AppName = "", name: HookName = "", id: HookId = ""
    ) -> dict[str, Any]:
        """Create, list or revoke deploy hooks. A hook is a secret URL; a POST to it rebuilds one app."""
        arguments = _checked(action, {"app": app, "name": name, "id": id})
        try:
            return await _done(hooks_of(context), action, arguments)
        except ServiceError as error:
            raise ToolError(f"{error.message} ({error.code})") from None
        except Refused as refused:
            raise ToolError(refused.message) from None

    tool = Tool.from_function(
        service_hook,
        title="Deploy hooks",
        annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False),
        structured_output=True,
    )
    tool.parameters["required"] = ["action"]
    return MCPServer(
        "capsule",
        title="Capsule",
        instructions=INSTRUCTIONS,
        version=version("capsule-gateway"),
        tools=[tool],
        log_level="ERROR",
        subscriptions=False,
    )


async def _done(hooks: AccountHooks, action: str, arguments: list[str]) -> dict[str, Any]:
    match action:
        case "create":
            note = "The URL shows only this once. A POST to it, without a body, deploys the app."
            return {"hook": await hooks.create(*arguments), "note": note}
        case "list":
            return {"hooks": await hooks.list()}
        case _:
            await hooks.revoke(*arguments)
            return {"revoked": arguments[0], "note": "Its URL answers 404 from now on."}


# -- standard input and output -------------------------------------------------------------------------------


class RemoteHooks:
    """Of the account whose key the command line has."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, app: str, name: str) -> dict[str, Any]:
        address = path("account", "apps", app, "hooks")
        return await asyncio.to_thread(self._service.fields, "POST", address, {"name": name}, having="url")

    async def list(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._service.rows, "/account/hooks")

    async def revoke(self, hook_id: str) -> None:
        await asyncio.to_thread(self._service.do, "DELETE", path("account", "hooks", hook_id))


def serve_stdio(service: Service) -> None:
    """Until standard input ends."""
    hooks = RemoteHooks(service)
    _server(lambda _: hooks).run("stdio")


# -- streamable HTTP -----------------------------------------------------------------------------------------


class OwnHooks:
    """Of an account, in this process."""

    def __init__(self, hooks: Hooks, account_id: str) -> None:
        self._hooks, self._account_id = hooks, account_id

    async def create(self, app: str, name: str) -> dict[str, Any]:
        return await self._hooks.create(self._account_id, app, name)

    async def list(self) -> list[dict[str, Any]]:
        return await self._hooks.list(self._account_id)

    async def revoke(self, hook_id: str) -> None:
        await self._hooks.revoke(self._account_id, hook_id)


class AgentEndpoint:
    """ASGI at `/mcp`, behind the account's API key. `running` is its part of the application's lifespan."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        server = _server(self._hooks_of)
        # Answers are plain JSON: the library that would stream them logs every chunk, a hook's URL included.
        server.streamable_http_app(
            stateless_http=True,
            json_response=True,
            max_request_body_size=BODY_LIMIT,
            transport_security=_only_ours(gateway.settings.base_url),
        )
        self._sessions = server.session_manager

    def _hooks_of(self, context: Context[Any]) -> OwnHooks:
        request = context.request_context.request
        assert request is not None
        return OwnHooks(self._gateway.hooks, request.scope[ACCOUNT])

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        async with self._sessions.run():
            yield

    # Litestar and the SDK name the types of ASGI differently.
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            request: Request[Any, Any, Any] = Request(scope)
            if request.method != "POST":
                raise MethodNotAllowed("POST")  # without sessions there is nothing to listen to, or to end
            account = await holder(request, self._gateway)
        except ServiceError as error:
            headers, body = error.render(scope["state"].get("request_id", ""))
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        await self._sessions.handle_request({**scope, ACCOUNT: account.id}, receive, send)


def _only_ours(base_url: str) -> TransportSecuritySettings:
    """No other name than the service's own may lead here, nor another site's page."""
    parts = urlsplit(base_url)
    return TransportSecuritySettings(allowed_hosts=[parts.netloc], allowed_origins=[f"{parts.scheme}://{parts.netloc}"])
