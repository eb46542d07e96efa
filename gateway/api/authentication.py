"""Authenticates API requests and the sessions of the pages.

Account holders send an API key and operators an operator token, both as `Authorization: Bearer …`. The pages send a
session cookie instead.
"""

from typing import Any

from litestar import Request, Response, Router
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.openapi.spec import SecurityRequirement
from litestar.types import ControllerRouterHandler

from gateway.accounts.api_keys import KeyReference
from gateway.accounts.operators import Operators
from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.accounts.sessions import ACCOUNT, OPERATOR, SAFE_METHODS, Sessions
from gateway.api.audit import begin_audit
from gateway.api.resources import ACCOUNT_RESOURCES, OPERATOR_RESOURCES
from gateway.errors import Unauthorized
from gateway.services import Services

ACCOUNT_STATE = "account"  # in the scope's state, for requests that `account_only` has admitted

# Routers and routes declare these for the API's OpenAPI document.
ACCOUNT_SECURITY: list[SecurityRequirement] = [{"apiKey": []}, {"session": []}]
OPERATOR_SECURITY: list[SecurityRequirement] = [{"operatorToken": []}, {"ops": []}]


def read_bearer(request: Request[Any, Any, State]) -> str:
    """Returns the bearer credential of the request, or an empty string."""
    headers = request.headers.getall("authorization", [])
    scheme, _, credential = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return credential.strip() if scheme.lower() == "bearer" else ""


async def require_account(request: Request[Any, Any, State], registry: Registry, sessions: Sessions) -> Account:
    """Returns the account of the API key, or without an authorization header that of the session cookie.

    Raises Unauthorized and CsrfRefused.
    """
    if "authorization" in request.headers:
        credential = read_bearer(request)
        key = await registry.api_keys.identify(credential) if credential else None
    else:
        key = await find_session_key(request, registry, sessions)
    account = await registry.account(key.account) if key else None
    if key is None or account is None:
        raise Unauthorized
    registry.api_keys.note_use(key)
    return account


async def find_session_key(
    request: Request[Any, Any, State], registry: Registry, sessions: Sessions
) -> KeyReference | None:
    """Returns the key that opened the request's session, unless it has been revoked. Raises CsrfRefused."""
    subject = await sessions.read_subject(request, ACCOUNT)
    key = KeyReference.parse(subject) if subject else None
    return key if key and await registry.api_keys.is_valid(key) else None


async def account_only(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guards routes for account holders; `Caller` is the account. Raises Unauthorized, CsrfRefused and RateLimited.

    A guard, because Litestar runs guards first, then reads parameters and bodies, and calls dependencies last.
    """
    request, services = request_of(connection)
    account = await require_account(request, services.registry, services.sessions)
    await services.pacing.admit(account.id, request.scope["state"], paced=UNPACED not in handler.opt)
    request.scope["state"][ACCOUNT_STATE] = account


def provide_account(request: Request[Any, Any, State]) -> Account:
    account: Account = request.scope["state"][ACCOUNT_STATE]
    return account


ACCOUNT_DEPENDENCY = {"account": Provide(provide_account, sync_to_thread=False)}


def account_router(*handlers: ControllerRouterHandler) -> Router:
    """Returns a router below `/account`, for account holders."""
    return Router(
        "/account",
        route_handlers=handlers,
        guards=[account_only],
        dependencies=ACCOUNT_DEPENDENCY | ACCOUNT_RESOURCES,
        tags=["Account"],
        security=ACCOUNT_SECURITY,
    )


def request_of(connection: ASGIConnection[Any, Any, Any, Any]) -> tuple[Request[Any, Any, State], Services]:
    """Returns the request and the services for a guard, because Litestar gives guards no dependencies."""
    assert isinstance(connection, Request)
    services: Services = connection.app.state.services
    return connection, services


# -- operators -----------------------------------------------------------------------------------------------


def is_operator_token(operators: Operators, credential: str) -> bool:
    return operators.find(credential) is not None


async def operators_only(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guards routes for operators' tokens and sessions, and begins the audit record of a change.

    Raises Unauthorized, CsrfRefused, and BackboneUnavailable if the change cannot be recorded.
    """
    request, services = request_of(connection)
    if "authorization" in request.headers:
        operator = services.operators.find(read_bearer(request))
    else:
        operator = services.operators.find_subject(await services.sessions.read_subject(request, OPERATOR))
    if operator is None:
        raise Unauthorized
    if request.method not in SAFE_METHODS:
        await begin_audit(request, services, operator, handler)


def operator_router(*handlers: ControllerRouterHandler) -> Router:
    """Returns a router below `/platform`, for operators."""
    return Router(
        "/platform",
        route_handlers=handlers,
        guards=[operators_only],
        dependencies=OPERATOR_RESOURCES,
        tags=["Platform"],
        security=OPERATOR_SECURITY,
    )


# -- sessions ------------------------------------------------------------------------------------------------


async def open_session(sessions: Sessions, cookie: str, subject: str) -> Response[None]:
    token = await sessions.open(subject)
    return Response(None, cookies=[sessions.build_cookie(cookie, token)])


async def close_session(sessions: Sessions, cookie: str, request: Request[Any, Any, State]) -> Response[None]:
    sessions.require_own_origin(request)
    await sessions.close(sessions.read_token(request, cookie))
    return Response(None, status_code=204, cookies=[sessions.build_cookie(cookie, "")])
