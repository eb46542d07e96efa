"""Signs people in at the OpenID provider, and lets them answer invitations and choose the account of their session."""

import html
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from litestar import Request, Response, delete, get, put
from litestar.datastructures import Cookie, State
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Redirect

from gateway.accounts.access import CALLS, Access, Role, Scope
from gateway.accounts.members import AccountChoice, InvitationView
from gateway.accounts.openid import SIGN_IN_SECONDS, Identity, OpenId
from gateway.accounts.operators import Operators
from gateway.accounts.registry import Registry
from gateway.accounts.session_store import Person
from gateway.accounts.sessions import ACCOUNT, SELECT_ACCOUNT, Sessions
from gateway.accounts.trail import AccountTrail
from gateway.api.authentication import find_session_access
from gateway.errors import (
    AccountNotChosen,
    AddressNotVerified,
    BackboneUnavailable,
    CsrfRefused,
    LoginsLimited,
    NotFound,
    NotPermitted,
    RegistrationsClosed,
    RequestMalformed,
    ServiceError,
    SignInFailed,
    SignInUnavailable,
    Unauthorized,
)
from gateway.pages.error_pages import render_page
from gateway.services import Injected
from gateway.settings import Settings
from gateway.validation import Id

TICKET = "capsule_sign_in"  # cookie name
SESSION_SECURITY: list[dict[str, list[str]]] = [{"session": []}]


BEGIN_ERRORS = [RequestMalformed, SignInUnavailable]
COMPLETE_ERRORS: list[type[ServiceError]] = [SignInFailed, AddressNotVerified, SignInUnavailable, LoginsLimited]
COMPLETE_ERRORS += [RegistrationsClosed, BackboneUnavailable]


@get("/dashboard/sign-in", media_type="text/html", tags=["Pages"], errors=BEGIN_ERRORS)
async def begin_sign_in(
    request: Request[Any, Any, State],
    openid: Injected[OpenId],
    sessions: Injected[Sessions],
    page: FromQuery[Literal["dashboard", "ops"]] = "dashboard",
) -> Response[Any]:
    """Go to the OpenID provider to sign in.

    The browser returns to `/dashboard/callback`, and then to `page`. After a log-out or a refusal, the provider lets
    the person select an account. Without a provider, this address does not exist.
    """
    if not openid.enabled:
        raise NotFoundException
    try:
        select_account = bool(sessions.read_token(request, SELECT_ACCOUNT))
        ticket, address = await openid.begin(page, select_account=select_account)
    except ServiceError as error:
        return _render_failure(error, page)
    # From the provider, which is another site, the browser sends no cookie with SameSite=Strict.
    cookies = [sessions.build_cookie(TICKET, ticket, seconds=SIGN_IN_SECONDS, same_site="lax")]
    cookies += [sessions.build_cookie(SELECT_ACCOUNT, "")] if select_account else []
    return Redirect(address, cookies=cookies, headers=NOT_STORED)


@get("/dashboard/callback", media_type="text/html", tags=["Pages"], errors=COMPLETE_ERRORS)
async def complete_sign_in(
    request: Request[Any, Any, State],
    openid: Injected[OpenId],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    operators: Injected[Operators],
    settings: Injected[Settings],
) -> Response[Any]:
    """Return from the OpenID provider.

    Opens a session for a person with a verified e-mail address. Somebody who is a member of no account gets one,
    whatever invitations wait for an answer. A refusal is a page.
    """
    if not openid.enabled:
        raise NotFoundException
    ticket = sessions.read_token(request, TICKET)
    page = "ops" if ".ops." in ticket else "dashboard"
    try:
        answer = dict(request.query_params)
        openid.check_return(ticket, answer)  # first, so that other sites cannot use up the visitor's attempts
        if openid.refuses_prompt(ticket, answer):
            return Redirect(f"/dashboard/sign-in?page={page}", headers=NOT_STORED)
        async with sessions.attempt(request):
            identity = await openid.complete(ticket, answer)
        operator = operators.match(identity.email, identity.claims)
        account = await _find_account(identity, request, registry, sessions, settings, is_operator=bool(operator))
        token = await sessions.open(str(Person(identity.email, account, operator, settings.oidc_issuer)))
    except ServiceError as error:
        return _render_failure(error, page, sessions.build_selection_cookies() if error.status < 500 else ())
    cookies = [sessions.build_cookie(ACCOUNT, token), sessions.build_cookie(TICKET, "", same_site="lax")]
    return Redirect(f"/{page}", cookies=cookies, headers=NOT_STORED)


NOT_STORED = {"cache-control": "no-store", "referrer-policy": "no-referrer"}


async def _find_account(
    identity: Identity,
    request: Request[Any, Any, State],
    registry: Registry,
    sessions: Sessions,
    settings: Settings,
    *,
    is_operator: bool,
) -> str:
    """Returns the id of the person's account, which is created if there is none, or "" if there are several.

    Raises RegistrationsClosed, but not for an operator, who needs no account, or for a person who is invited to one.
    """
    accounts = await registry.members.list_accounts(identity.email)
    if accounts:
        return accounts[0].account.id if len(accounts) == 1 else ""
    try:
        await sessions.count_registration(request, settings.registrations_per_day)
        return (await registry.register_person(identity.email, settings.registrations_per_day)).id
    except RegistrationsClosed:
        if is_operator or await registry.members.list_invitations(identity.email):
            return ""
        raise


def _render_failure(error: ServiceError, page: str, cookies: Sequence[Cookie] = ()) -> Response[bytes]:
    again = f'<p><a href="/dashboard/sign-in?page={page}">Sign in again</a></p>'
    body, headers = render_page("You are not signed in", html.escape(error.message), again)
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return Response(body, status_code=error.status, media_type="text/html", headers=headers, cookies=cookies)


# -- the session -----------------------------------------------------------------------------------------------


class SessionView(msgspec.Struct):
    email: str | None  # of the person who signed in; null for the session of an API key
    account: str | None  # id; null until one is chosen
    role: Role | None
    scope: Scope
    permitted: list[str]  # the calls of the account API that the session may make, by their operation
    accounts: list[AccountChoice]  # of the person
    invitations: list[InvitationView]  # of the person, which wait for an answer; the newest 50
    operator: bool  # whether the session opens /ops


@get("/dashboard/session", tags=["Pages"], security=SESSION_SECURITY, errors=[Unauthorized, BackboneUnavailable])
async def show_session(
    request: Request[Any, Any, State],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    operators: Injected[Operators],
) -> SessionView:
    """Show who is logged in to the dashboard, and what they may do."""
    subject = await sessions.read_subject(request, ACCOUNT)
    person = Person.parse(subject)
    operator = operators.find_person(person) is not None
    try:
        access = await find_session_access(subject, registry)
        if access is None and not operator:
            raise Unauthorized
    except AccountNotChosen:
        access = None
    accounts = await registry.members.list_accounts(person.email) if person else []
    invitations = await registry.members.list_invitations(person.email) if person else []
    return SessionView(
        email=person.email if person else None,
        account=access.account.id if access else None,
        role=access.role if access else None,
        scope=access.scope if access else "full",
        permitted=[call.name for call in CALLS.values() if access and access.admits(call)],
        accounts=[each.choice for each in accounts],
        invitations=invitations,
        operator=operator,
    )


class ChosenAccount(msgspec.Struct, forbid_unknown_fields=True):
    account: Id


@put(
    "/dashboard/session",
    status_code=204,
    tags=["Pages"],
    security=SESSION_SECURITY,
    errors=[RequestMalformed, Unauthorized, CsrfRefused, NotPermitted, NotFound, BackboneUnavailable],
)
async def choose_account(
    request: Request[Any, Any, State],
    data: JSONBody[ChosenAccount],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
) -> None:
    """Choose the account of the session, for a person who belongs to several.

    `account` is the id of one of them.
    """
    person = await require_person(request, sessions)
    await _choose(request, person, data.account, registry, sessions)


# -- invitations -----------------------------------------------------------------------------------------------


ANSWER_ERRORS: list[type[ServiceError]] = [Unauthorized, CsrfRefused, NotPermitted, NotFound, BackboneUnavailable]


@put(
    "/dashboard/session/invitations/{account:str}",
    tags=["Pages"],
    security=SESSION_SECURITY,
    errors=[RequestMalformed, *ANSWER_ERRORS],
)
async def accept_invitation(
    request: Request[Any, Any, State],
    account: FromPath[str],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    account_trail: Injected[AccountTrail],
) -> AccountChoice:
    """Accept an invitation.

    The person becomes a member of the account, which is chosen for the session. A person belongs to at most 50
    accounts.
    """
    person = await require_person(request, sessions)
    if not await registry.members.belongs(account, person.email):  # otherwise this is a repetition
        async with _answering(account, person, "accept_invitation", registry, account_trail):
            await registry.members.accept(account, person.email)
    return await _choose(request, person, account, registry, sessions)


@delete("/dashboard/session/invitations/{account:str}", tags=["Pages"], security=SESSION_SECURITY, errors=ANSWER_ERRORS)
async def decline_invitation(
    request: Request[Any, Any, State],
    account: FromPath[str],
    registry: Injected[Registry],
    sessions: Injected[Sessions],
    account_trail: Injected[AccountTrail],
) -> None:
    """Decline an invitation."""
    person = await require_person(request, sessions)
    async with _answering(account, person, "decline_invitation", registry, account_trail):
        await registry.members.decline(account, person.email)


async def require_person(request: Request[Any, Any, State], sessions: Sessions) -> Person:
    """Returns who has signed in. Raises Unauthorized, CsrfRefused, and NotPermitted for the session of an API key."""
    subject = await sessions.read_subject(request, ACCOUNT)
    if subject is None:
        raise Unauthorized
    person = Person.parse(subject)
    if person is None:
        raise NotPermitted("This session is that of an API key, which belongs to one account.")
    return person


async def _choose(
    request: Request[Any, Any, State], person: Person, account_id: str, registry: Registry, sessions: Sessions
) -> AccountChoice:
    """Makes an account of the person that of the session. Raises NotFound."""
    for each in await registry.members.list_accounts(person.email):
        if each.account.id == account_id:
            await sessions.choose_account(sessions.read_token(request, ACCOUNT), person, account_id)
            return each.choice
    raise NotFound("You are not a member of such an account.")


@asynccontextmanager
async def _answering(
    account_id: str, person: Person, action: str, registry: Registry, trail: AccountTrail
) -> AsyncGenerator[None]:
    """Wraps the answer to an invitation, and records it in the account's trail unless it is refused.

    Raises NotFound if there is no such invitation, before anything is recorded.
    """
    invitation = await registry.members.require_invitation(account_id, person.email)
    account = await registry.account(account_id)
    if account is None or account.deletion is not None:
        raise NotFound("There is no such invitation; it may have ended.")
    access = Access(account, person.email, "session", role=invitation.role, email=person.email)
    async with trail.record(access, action, person.email):
        yield


ROUTES = [begin_sign_in, complete_sign_in, show_session, choose_account, accept_invitation, decline_invitation]
