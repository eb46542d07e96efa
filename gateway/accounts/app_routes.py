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
from gateway.accounts.records import App, Build, JwksAuth, Repository, set_fields
from gateway.accounts.routes import AccountApp, list_apps, view_apps
from gateway.deploys.routes import require_own_app
from gateway.errors import AppLimitReached, NameTaken, NotFound, RateLimited, RequestMalformed
from gateway.http.authentication import Caller, account_router
from gateway.ids import new_id, now_iso
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


@patch("/apps/{app:str}", errors=[RequestMalformed, NotFound, RateLimited])
async def change_app(account: Caller, app: FromPath[str], data: JSONBody[AppChange], gateway: Injected) -> AppSettings:
    """Change an app's token verification, repository and build.

    A field that is left out stays as it is; null resets it. Repository and build apply from the next deploy on.
    """
    found = await require_own_app(app, account, gateway)
    await gateway.app_changes.count_change(account.id)
    changes: dict[str, Any] = {}
    if data.auth is not msgspec.UNSET:
        allow_private = gateway.settings.allow_private_addresses
        changes["auth"] = check_auth(data.auth or JwksAuth(), gateway.vault, allow_private=allow_private)
    if data.repository is not msgspec.UNSET:
        repository = check_repository(data.repository, gateway)
        changes["repository"] = keep_credentials(repository, found.repository)
    if data.build is not msgspec.UNSET:
        changes["build"] = check_build(data.build)
    if changes:
        found = await gateway.registry.change_app(found, lambda record: set_fields(record, changes))
    return view_settings(found)


def keep_credentials(repository: Repository | None, before: Repository | None) -> Repository | None:
    """Keeps the credentials of a repository whose URL stays the same, unless new ones are given.

    No response shows them, so a client cannot send them again.
    """
    if repository is None or before is None or repository.credentials or repository.url != before.url:
        return repository
    return msgspec.structs.replace(repository, credentials=before.credentials)


@delete("/apps/{app:str}", errors=[NotFound, RateLimited])
async def delete_app(account: Caller, app: FromPath[str], gateway: Injected) -> None:
    """Delete an app.

    This also deletes its hooks, variables, sources and queued deploys, and cannot be undone.
    """
    found = await require_own_app(app, account, gateway)
    await gateway.app_changes.count_change(account.id)
    await forget_app(found, gateway)


ROUTES = [account_router(list_apps, create_app, show_settings, change_app, delete_app, *app_detail_routes.HANDLERS)]
