"""Authenticates API requests and the sessions of the pages.

Account holders send an API key and operators an operator token, both as `Authorization: Bearer …`. The pages send a
session cookie instead.

A request is checked before its body is read, and once more when it is complete, right before the change: a caller that
has lost its right meanwhile changes nothing. Streams check their caller every second.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, urlencode

from litestar import Request, Response, Router
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.openapi.spec import SecurityRequirement
from litestar.types import ControllerRouterHandler

from gateway.accounts.access import CALLS, TAKES_RIGHTS, Access, By, Call, Where
from gateway.accounts.api_keys import KeyReference
from gateway.accounts.operators import Operator, Operators
from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import Person
from gateway.accounts.sessions import ACCOUNT, OPERATOR, SAFE_METHODS, Sessions
from gateway.api.audit import begin_audit, begin_change
from gateway.api.bodies import declared_size
from gateway.api.resources import ACCOUNT_RESOURCES, OPERATOR_RESOURCES
from gateway.errors import AccountNotChosen, NotPermitted, ServiceError, Unauthorized
from gateway.services import Services

CHECK = "caller_check"  # in the scope's state, for requests that a guard has admitted
FRESH_SECONDS = 0.05  # for which a check holds
STREAM_CHECK_SECONDS = 1.0  # between two checks of a stream's caller
STREAMED = "streamed"  # an option of routes that read their body with `stream_body`

# Routers and routes declare these for the API's OpenAPI document.
ACCOUNT_SECURITY: list[SecurityRequirement] = [{"apiKey": []}, {"session": []}]
OPERATOR_SECURITY: list[SecurityRequirement] = [{"operatorToken": []}, {"ops": []}]


def read_bearer(request: Request[Any, Any, State]) -> str:
    """Returns the bearer credential of the request, or an empty string."""
    headers = request.headers.getall("authorization", [])
    scheme, _, credential = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return credential.strip() if scheme.lower() == "bearer" else ""


async def require_access(request: Request[Any, Any, State], registry: Registry, sessions: Sessions) -> Access:
    """Returns what the API key may do, or without an authorization header the session.

    Raises Unauthorized, CsrfRefused, AccountNotChosen, and NotPermitted for a key whose only app is gone.
    """
    if "authorization" in request.headers:
        credential = read_bearer(request)
        reference = await registry.api_keys.identify(credential) if credential else None
        access = await find_access(reference, registry) if reference else None
    else:
        access = await find_session_access(await sessions.read_subject(request, ACCOUNT), registry)
    if access is None:
        raise Unauthorized
    return access


async def find_session_access(subject: str | None, registry: Registry) -> Access | None:
    """Returns what a session may do; None if its key is not valid, or its person no member of its account any more.

    An operator's session goes on without the account. Raises AccountNotChosen, and NotPermitted for a key whose only
    app is gone.
    """
    person = Person.parse(subject)
    if person is None:
        reference = KeyReference.parse(subject) if subject else None
        return await find_access(reference, registry, "session") if reference else None
    if person.account:
        role = await registry.members.find_role(person.account, person.email)
        account = await registry.account(person.account)
        if role is not None and account is not None and not account.is_gone:
            return Access(account, person.email, "session", role=role, email=person.email)
        if not person.operator:
            return None
    raise AccountNotChosen([each.choice for each in await registry.members.list_accounts(person.email)])


async def find_access(reference: KeyReference, registry: Registry, by: By = "key") -> Access | None:
    """Returns what a key may do; None if it is not valid. Raises NotPermitted if its only app is gone."""
    key, account = await registry.api_keys.find(reference), await registry.account(reference.account)
    if key is None or account is None or account.is_gone:
        return None
    registry.api_keys.note_use(reference)
    only = None
    if key.appId is not None:
        only = await registry.app(key.app or "")  # from memory, unless the app was renamed
        if only is None or only.id != key.appId:
            only = await registry.find_app(key.appId)
        if only is None or (only.id, only.account) != (key.appId, account.id):
            raise NotPermitted(f"This API key is for the app {key.app} only, which is not in this account any more.")
    return Access(account, f"{key.name} ({key.id})", by, key.scope, only=only, key_id=key.id)


T = TypeVar("T")


class CallerCheck(Generic[T]):
    """The check of a request's caller. `name_caller` tells one caller from another."""

    def __init__(self, find: Callable[[], Awaitable[T]], name_caller: Callable[[T], object]) -> None:
        self._find, self._name_caller, self._at = find, name_caller, 0.0
        self._name: object = None

    async def run(self) -> T:
        """Returns what the caller is now. Raises what its request is refused with.

        A session may have moved to another account since the request began: then it is another caller.
        """
        self._at = time.monotonic()
        caller = await self._find()
        name = self._name_caller(caller)
        if self._name not in (None, name):
            raise Unauthorized
        self.caller, self._name = caller, name
        return caller

    async def confirm(self) -> T:
        """Like `run`, unless the last check has just been made."""
        return self.caller if time.monotonic() - self._at < FRESH_SECONDS else await self.run()


def name_access(access: Access) -> object:
    return access.account.id, access.who


def reads_body(request: Request[Any, Any, State], handler: BaseRouteHandler) -> bool:
    """Returns whether the guard waits for the whole body, which Litestar reads from memory afterwards."""
    has_body = "transfer-encoding" in request.headers or request.headers.get("content-length", "0").strip("0") != ""
    return has_body and request.method not in SAFE_METHODS and STREAMED not in handler.opt


async def stream_body(request: Request[Any, Any, State]) -> AsyncGenerator[bytes]:
    """Yields the parts of the body, and checks the caller again at its end."""
    async for part in request.stream():
        yield part
    await request.scope["state"][CHECK].confirm()


async def end_with_right(request: Request[Any, Any, State], stream: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yields what the stream yields, until it ends or its caller may not see it any more."""
    check: CallerCheck[Any] = request.scope["state"][CHECK]
    checked_at = time.monotonic()
    async with contextlib.aclosing(stream):
        following: asyncio.Task[bytes | None] | None = None
        try:
            while True:
                following = following or asyncio.create_task(_read_next(stream))
                await asyncio.wait([following], timeout=STREAM_CHECK_SECONDS)
                if time.monotonic() - checked_at >= STREAM_CHECK_SECONDS:
                    checked_at = time.monotonic()
                    try:
                        await check.run()
                    except ServiceError as error:
                        if error.status < 500:  # while Redis is away, the stream itself decides
                            return
                if following.done():
                    part, following = following.result(), None
                    if part is None:
                        return
                    yield part
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait([following])


async def _read_next(stream: AsyncGenerator[bytes]) -> bytes | None:
    return await anext(stream, None)


async def account_only(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guards routes for account holders; `CallerAccess` is what the caller may do, and `Caller` its account.

    A guard, because Litestar runs guards first, then reads parameters and bodies, and calls dependencies last.
    Raises Unauthorized, CsrfRefused, NotPermitted and RateLimited.
    """
    request, services = request_of(connection)
    call = CALLS.get(f"{request.method} {request.scope['path_template']}")
    state = request.scope["state"]

    async def find_caller() -> Access:
        access = await require_access(request, services.registry, services.sessions)
        if not leaves_account(request, access, call):
            access.require(call)
        return access

    state[CHECK] = check = CallerCheck(find_caller, name_access)
    access = await check.run()
    takes_rights = call is not None and call.name in TAKES_RIGHTS
    meter = services.pacing.meter(access.account.id, access.who, state, takes_rights=takes_rights)
    paced = UNPACED not in handler.opt
    if reads_body(request, handler):
        async with meter.receiving(declared_size(request)):
            await request.body()
            await meter.enter(paced=paced)
    else:
        await meter.enter(paced=paced)
    access = await check.confirm()
    if access.only is not None and call is not None and call.where is Where.FILTER:
        choose_app(request, access)
    if call is not None and call.changes:
        await begin_change(request, services, access, call)


def leaves_account(request: Request[Any, Any, State], access: Access, call: Call | None) -> bool:
    """Returns whether this is a member who leaves the account, which every role may."""
    if call is None or call.name != "remove_member" or not access.email:
        return False
    return str(request.path_params["email"]).removeprefix("/").lower() == access.email


def choose_app(request: Request[Any, Any, State], access: Access) -> None:
    """Sets the parameter `app` to the key's only app. Raises NotPermitted if the request names another one."""
    assert access.only is not None
    query = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for app in (value for name, value in query if name == "app" and value):
        access.require_app(app)
    kept = [(name, value) for name, value in query if name != "app"]
    request.scope["query_string"] = urlencode([*kept, ("app", access.only.name)]).encode()


def provide_access(request: Request[Any, Any, State]) -> Access:
    check: CallerCheck[Access] = request.scope["state"][CHECK]
    return check.caller


def provide_account(request: Request[Any, Any, State]) -> Account:
    return provide_access(request).account


ACCOUNT_DEPENDENCIES = {
    "access": Provide(provide_access, sync_to_thread=False),
    "account": Provide(provide_account, sync_to_thread=False),
}


def account_router(*handlers: ControllerRouterHandler) -> Router:
    """Returns a router below `/account`, for account holders."""
    return Router(
        "/account",
        route_handlers=handlers,
        guards=[account_only],
        dependencies=ACCOUNT_DEPENDENCIES | ACCOUNT_RESOURCES,
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

    async def find_operator() -> Operator:
        if "authorization" in request.headers:
            operator = services.operators.find(read_bearer(request))
        else:
            operator = await find_session_operator(request, services.operators, services.sessions)
        if operator is None:
            raise Unauthorized
        return operator

    request.scope["state"][CHECK] = check = CallerCheck(find_operator, lambda operator: operator.name)
    await check.run()
    if reads_body(request, handler):
        await request.body()
    operator = await check.confirm()
    if request.method not in SAFE_METHODS:
        await begin_audit(request, services, operator, handler)


async def find_session_operator(
    request: Request[Any, Any, State], operators: Operators, sessions: Sessions
) -> Operator | None:
    """Returns the operator who has logged in with a token, or has signed in. Raises CsrfRefused."""
    operator = operators.find_subject(await sessions.read_subject(request, OPERATOR))
    return operator or operators.find_person(Person.parse(await sessions.read_subject(request, ACCOUNT)))


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
    cookies = [sessions.build_cookie(cookie, ""), *sessions.build_selection_cookies()]
    return Response(None, status_code=204, cookies=cookies)
