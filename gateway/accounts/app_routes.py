"""The account API: lists, creates, changes and deletes the account's apps."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import delete, get, patch, post
from litestar.params import FromPath, JSONBody

from gateway.accounts import app_detail_routes
from gateway.accounts.app_fields import NewAuth, check_auth, check_build, check_name
from gateway.accounts.domain_names import apps_host, service_hosts
from gateway.accounts.operator_routes import check_new_name, check_repository, forget_app, view_auth
from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import App, Build, JwksAuth, Repository, set_fields
from gateway.accounts.routes import AccountApp, list_apps, view_apps
from gateway.bounds import UserToken
from gateway.deploys.routes import require_own_app
from gateway.errors import (
    AppLimitReached,
    AppSuspended,
    NameTaken,
    NotFound,
    RateLimited,
    RequestMalformed,
    TokensLimited,
)
from gateway.http.authentication import Caller, account_router
from gateway.ids import new_id, now_iso
from gateway.inference.auth.auth_checks import AuthCheck
from gateway.inference.auth.auth_checks import check_auth as check_verification
from gateway.inference.auth.users import TokenCheck
from gateway.process import Gateway, Injected


class NewApp(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class AppChange(msgspec.Struct, forbid_unknown_fields=True):
    """A field that is left out stays as it is; null resets it."""

    auth: NewAuth | msgspec.UnsetType | None = msgspec.UNSET
    repository: Repository | msgspec.UnsetType | None = msgspec.UNSET
    build: Build | msgspec.UnsetType | None = msgspec.UNSET


class OwnRepository(msgspec.Struct):
    url: str
    branch: str
    hasCredentials: bool


class AppSettings(msgspec.Struct):
    """The account holder's settings of an app, without the auth secret and the repository's credentials."""

    auth: dict[str, Any]
    repository: OwnRepository | None
    build: Build | None


class ChangedSettings(AppSettings):
    authCheck: AuthCheck | msgspec.UnsetType = msgspec.UNSET  # if the request has `auth`


class PresentedToken(msgspec.Struct, forbid_unknown_fields=True):
    token: UserToken


def view_settings(app: App) -> AppSettings:
    view = None
    if (repository := app.repository) is not None:
        view = OwnRepository(repository.url, repository.branch, hasCredentials=bool(repository.credentials))
    return AppSettings(auth=view_auth(app.auth), repository=view, build=app.build)


@post("/apps", errors=[RequestMalformed, NameTaken, AppLimitReached, RateLimited])
async def create_app(account: Caller, data: JSONBody[NewApp], gateway: Injected) -> AccountApp:
    """Create an app.

    Its name is the first part of its address. The plan limits the number of apps.
    """
    check_name(data.name)
    check_new_name(data.name)
    check_service_host(data.name, gateway)
    # Unlike an operators' app, it has an id of its own: the next app with this name inherits nothing.
    app_id = new_id("app").replace("_", "-")
    app = App(id=app_id, name=data.name, account=account.id, createdAt=now_iso())
    await gateway.app_changes.create_app(app, gateway.settings.app_limits[account.plan])
    (view,) = await view_apps(account, [app], gateway)
    return view


def check_service_host(name: str, gateway: Gateway) -> None:
    """Raises RequestMalformed for the name whose address would be the service's own."""
    if f"{name}.{apps_host(gateway.settings)}" in service_hosts(gateway.settings):
        raise RequestMalformed("name: this is the service's own address; choose another name.")


@get("/apps/{app:str}/settings", summary="Show the settings of an app", errors=[NotFound])
async def show_settings(account: Caller, app: FromPath[str], gateway: Injected) -> AppSettings:
    return view_settings(await require_own_app(app, account, gateway))


@patch(
    "/apps/{app:str}",
    errors=[RequestMalformed, NotFound, RateLimited],
    opt={UNPACED: True},  # a slow backend must not delay the account's other requests
)
async def change_app(
    account: Caller, app: FromPath[str], data: JSONBody[AppChange], gateway: Injected
) -> ChangedSettings:
    """Change an app's token verification, repository and build.

    A field that is left out stays as it is; null resets it. Repository and build apply from the next deploy on. A new
    `auth` is saved in any case, and checked with one call that takes at most five seconds: `authCheck` has the result.
    """
    found = await require_own_app(app, account, gateway)
    await gateway.app_changes.count_change(account.id)
    changes: dict[str, Any] = {}
    if data.auth is not msgspec.UNSET:
        allow_private = gateway.settings.allow_private_addresses
        changes["auth"] = check_auth(
            data.auth or JwksAuth(), gateway.vault, allow_private=allow_private, save_internal=True
        )
    if data.repository is not msgspec.UNSET:
        repository = check_repository(data.repository, gateway)
        changes["repository"] = keep_credentials(repository, found.repository)
    if data.build is not msgspec.UNSET:
        changes["build"] = check_build(data.build)
    if changes:
        found = await gateway.registry.change_app(found, lambda record: set_fields(record, changes))
    answer = ChangedSettings(**msgspec.structs.asdict(view_settings(found)))
    if data.auth is not msgspec.UNSET:
        allow_private = gateway.settings.allow_private_addresses
        answer.authCheck = await check_verification(gateway.users, found, allow_private=allow_private)
    return answer


@post(
    "/apps/{app:str}/token-check",
    status_code=200,
    summary="Check a token of an app's user",
    errors=[RequestMalformed, NotFound, RateLimited, TokensLimited],
    opt={UNPACED: True},
)
async def check_token(
    account: Caller, app: FromPath[str], data: JSONBody[PresentedToken], gateway: Injected
) -> TokenCheck:
    """Check a token like a request of the app's user, and explain why it would be refused.

    Nothing of the token is kept. An account can check 10 tokens per minute.
    """
    found = await require_own_app(app, account, gateway)
    await gateway.app_changes.count_token_check(account.id)
    return await gateway.users.check(found, data.token.strip().encode())


def keep_credentials(repository: Repository | None, before: Repository | None) -> Repository | None:
    """Keeps the credentials of a repository whose URL stays the same, unless new ones are given.

    No response shows them, so a client cannot send them again.
    """
    if repository is None or before is None or repository.credentials or repository.url != before.url:
        return repository
    return msgspec.structs.replace(repository, credentials=before.credentials)


@delete("/apps/{app:str}", errors=[AppSuspended, NotFound, RateLimited])
async def delete_app(account: Caller, app: FromPath[str], gateway: Injected) -> None:
    """Delete an app.

    This also deletes its hooks, variables, sources and queued deploys, and cannot be undone. A suspended app stays
    until an operator lifts its suspension, because otherwise its name could be used again at once.
    """
    found = await require_own_app(app, account, gateway)
    if found.suspension is not None:
        raise AppSuspended("A suspended app can't be deleted; ask the operator to lift the suspension first.")
    await gateway.app_changes.count_change(account.id)
    await forget_app(found, gateway)


ROUTES = [
    account_router(
        list_apps, create_app, show_settings, change_app, check_token, delete_app, *app_detail_routes.HANDLERS
    )
]
