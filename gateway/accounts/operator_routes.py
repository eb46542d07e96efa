"""The operators' API: the records of apps."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import delete, get, put
from litestar.params import FromPath, JSONBody

from gateway.accounts.app_fields import NewAuth, check_auth, check_build, check_name
from gateway.accounts.domain_claims import verified_domain
from gateway.accounts.domain_names import normalize_domain
from gateway.accounts.records import (
    BRANCH,
    PREVIEW,
    Account,
    AllowedRates,
    App,
    Auth,
    Build,
    JwksAuth,
    Repository,
    Suspension,
)
from gateway.accounts.vault import NoEncryptionKey
from gateway.bounds import Host, Id
from gateway.deploys.addresses import live_url
from gateway.errors import NameTaken, NotFound, RequestMalformed
from gateway.http.authentication import operator_router
from gateway.ids import Time, now_iso
from gateway.outbound import addresses
from gateway.process import Gateway, Injected


class AppFields(msgspec.Struct, forbid_unknown_fields=True):
    """A complete record: fields that are left out are reset."""

    account: Id
    name: Id | None = None
    auth: NewAuth = JwksAuth()
    customDomain: Host | None = None
    customDomainVerified: bool = False
    repository: Repository | None = None
    build: Build | None = None
    limits: AllowedRates | None = None


class RepositoryView(msgspec.Struct):
    url: str
    branch: str


class AppView(msgspec.Struct):
    """An app as operators see it, without the auth secret and the repository's credentials."""

    id: str
    name: str
    account: str
    auth: dict[str, Any]
    customDomain: str | None
    customDomainVerified: bool
    repository: RepositoryView | None
    build: Build | None
    limits: AllowedRates | None
    createdAt: Time
    url: str
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app itself


def view_app(app: App, gateway: Gateway) -> AppView:
    return AppView(
        id=app.id,
        name=app.name,
        account=app.account,
        auth=view_auth(app.auth),
        customDomain=app.customDomain,
        customDomainVerified=app.customDomainVerified,
        repository=view_repository(app),
        build=app.build,
        limits=app.allowedRates,
        createdAt=app.createdAt,
        url=live_url(app.name, gateway.settings),
        suspension=app.suspension or msgspec.UNSET,
    )


def view_repository(app: App) -> RepositoryView | None:
    return None if app.repository is None else RepositoryView(app.repository.url, app.repository.branch)


def view_auth(auth: Auth) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(auth).items() if name != "secret"}


async def require_app(app: str, gateway: Gateway) -> App:
    """Returns the app with this id or name. Raises NotFound."""
    record: App | None = await gateway.registry.find_app(app)
    if record is None:
        raise NotFound
    return record


async def require_account(account_id: str, gateway: Gateway) -> Account:
    """Returns the account with this id. Raises NotFound."""
    account: Account | None = await gateway.registry.account(account_id)
    if account is None:
        raise NotFound("There is no such account.")
    return account


@put("/apps/{app:str}", errors=[RequestMalformed, NameTaken])
async def put_app(app: FromPath[str], data: JSONBody[AppFields], gateway: Injected) -> AppView:
    """Create or replace an app.

    `limits` replace the service's limits for this app, and can be wider. The account holder's limits stay, and so does
    a suspension.
    """
    before = await gateway.registry.find_app(app)
    name = data.name or (before.name if before else app)
    await check_names(app, name, data.account, before, gateway)
    domain = check_domain(data.customDomain)
    record = App(
        id=before.id if before else app,
        name=name,
        account=data.account,
        auth=check_auth(data.auth, gateway.vault, allow_private=gateway.settings.allow_private_addresses),
        customDomain=domain,
        customDomainVerified=data.customDomainVerified,
        # A put that repeats what the account holder has proven leaves it so: the TXT record stays necessary.
        customDomainProven=data.customDomainVerified and is_proven(before, data.account, domain),
        repository=check_repository(data.repository, gateway),
        build=check_build(data.build),
        allowedRates=None if data.limits == AllowedRates() else data.limits,
        createdAt=before.createdAt if before else now_iso(),
    )
    record = await gateway.registry.put_app(record, before)
    if before is not None and before.account != record.account:
        await gateway.environments.forget_variables(before)
    return view_app(record, gateway)


async def check_names(app: str, name: str, account: str, before: App | None, gateway: Gateway) -> None:
    """Raises RequestMalformed for an invalid name or an unknown account, and NameTaken."""
    check_name(app)
    check_name(name)
    for new in {app, name} - ({before.id, before.name} if before else set()):
        check_new_name(new)
    if await gateway.registry.account(account) is None:
        raise RequestMalformed("account: there is no such account.")
    taken = await gateway.registry.find_app(name)
    if taken is not None and (before is None or taken.id != before.id):
        raise NameTaken


def check_new_name(name: str) -> None:
    """Raises RequestMalformed for a name that is reserved for previews."""
    if PREVIEW.fullmatch(name):
        raise RequestMalformed("name: names that end in -preview are addresses of previews; choose another.")


def check_repository(repository: Repository | None, gateway: Gateway) -> Repository | None:
    """Returns the repository to store, with user name and password encrypted and outside the URL.

    Raises RequestMalformed.
    """
    if repository is None:
        return None
    if not BRANCH.fullmatch(repository.branch):
        raise RequestMalformed("repository.branch: git does not accept this branch name; use one such as main.")
    if repository.credentials:
        raise RequestMalformed("repository: put user name and password into the URL: https://user:password@…")
    scheme, _, rest = repository.url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, _, host = authority.rpartition("@")
    url = f"{scheme}://{host}{slash}{path}"
    allow_private = gateway.settings.allow_private_addresses
    try:
        if not (allow_private and url.startswith("file:///")):
            addresses.check_url(url, allow_private=allow_private)
        sealed = gateway.vault.seal(credentials) if credentials else ""
    except (addresses.BlockedAddress, ValueError, NoEncryptionKey) as error:
        raise RequestMalformed(f"repository.url: {error}") from None
    return msgspec.structs.replace(repository, url=url, credentials=sealed)


def check_domain(domain: str | None) -> str | None:
    """Returns the normalized domain. Raises RequestMalformed."""
    return None if domain is None else normalize_domain(domain, "customDomain")


def is_proven(before: App | None, account: str, domain: str | None) -> bool:
    """Returns whether the account has proven with a TXT record that it owns the domain."""
    if before is None or before.account != account or not before.customDomainProven:
        return False
    return verified_domain(before) == domain


@get("/apps/{app:str}", errors=[NotFound])
async def get_app(app: FromPath[str], gateway: Injected) -> AppView:
    """Show an app."""
    return view_app(await require_app(app, gateway), gateway)


@delete("/apps/{app:str}", errors=[NotFound])
async def delete_app(app: FromPath[str], gateway: Injected) -> None:
    """Delete an app."""
    await forget_app(await require_app(app, gateway), gateway)


async def forget_app(app: App, gateway: Gateway) -> None:
    """Deletes an app with all its data. Raises NotFound if it now belongs to another account.

    The record is deleted last, so that an interrupted deletion can be repeated.
    """
    if await gateway.deploys.find_live_id(app) is not None:
        await gateway.app_changes.withhold_name(app)
    await gateway.hooks.forget_app(app)
    await gateway.environments.forget_variables(app)
    await gateway.data_commands.forget_app(app, gateway.data)
    await gateway.deploys.forget_app(app)
    await gateway.app_changes.delete_app(app)


ROUTES = [operator_router(put_app, get_app, delete_app)]
