"""An account's apps as their holder lists, creates, changes and deletes them, by the API or by an agent tool."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec

from gateway.accounts.access import Access
from gateway.accounts.app_changes import CHANGES, TOKEN_CHECKS, AppChanges
from gateway.accounts.app_fields import (
    NewAuth,
    NewRepository,
    check_auth,
    check_build,
    check_name,
    check_new_name,
    check_repository,
)
from gateway.accounts.app_limits import LimitsChange
from gateway.accounts.domain_names import apps_host, service_hosts
from gateway.accounts.domain_observations import read_certificates
from gateway.accounts.records import (
    Account,
    App,
    Auth,
    Build,
    JwksAuth,
    Repository,
    Suspension,
    find_suspension,
    set_fields,
)
from gateway.accounts.registry import Registry
from gateway.deploys.addresses import live_url
from gateway.deploys.records import DeployRecords
from gateway.errors import AppSuspended, RequestMalformed
from gateway.ids import Time, new_id, now_iso
from gateway.inference.auth.auth_checks import AuthCheck
from gateway.inference.auth.auth_checks import check_auth as check_verification
from gateway.inference.auth.users import TokenCheck, Users
from gateway.inference.spend.limits import (
    AppSpend,
    LimitsView,
    check_limits,
    find_widest,
    limits_of,
    read_spend,
)
from gateway.keys import app_spend_fields, certificate_key, partition_tag
from gateway.monitors import health, history
from gateway.monitors.health import MonitoredApp
from gateway.monitors.history import HealthDay
from gateway.operations.removal import Removal
from gateway.settings import Settings

AUTH = (
    'how the tokens of the app\'s users are verified, such as {"kind": "jwks", "url": "/api/auth/jwks"}, '
    '{"kind": "backend", "url": "https://…"} or {"kind": "secret", "secret": "…"}'
)
REPOSITORY = 'a git repository, such as {"url": "https://…", "branch": "main"}; without branch, its default branch'
BUILD = (
    'how to build it, such as {"command": "npm ci && npm run build", "output": "dist"}, or with "start", the command '
    'of its backend, and "health", a path that shows that it works. Applies from the next deploy on'
)


class RepositoryView(msgspec.Struct):
    url: str
    branch: str | None  # null: the repository's default branch


class OwnRepository(RepositoryView):
    hasCredentials: bool


def view_repository(app: App) -> RepositoryView | None:
    return None if app.repository is None else RepositoryView(app.repository.url, app.repository.branch or None)


def view_auth(auth: Auth) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(auth).items() if name != "secret"}


class AppDomain(msgspec.Struct):
    """A custom domain of an app."""

    domain: str
    verified: bool


def view_domains(app: App) -> list[AppDomain]:
    return [AppDomain(domain.name, domain.verified) for domain in app.domains]


class AccountApp(MonitoredApp, kw_only=True):
    """An app as its account sees it."""

    url: str
    customDomain: str | None  # the primary
    customDomainVerified: bool
    domains: list[AppDomain]  # the primary first
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app, or else of its account


class CertificateView(msgspec.Struct):
    """The certificate of a custom domain at its last inspection: of several, the one that ends first."""

    domain: str
    expiresAt: Time
    issuer: str | None


class AppDetails(AccountApp, kw_only=True):
    """An app of the list, with further details."""

    createdAt: Time
    liveDeploy: str | None  # id of the deploy that the app serves
    repository: RepositoryView | None
    build: Build | None
    certificate: CertificateView | None
    healthDays: list[HealthDay]  # of 90 days, oldest first; the last one is today, in UTC


class NewApp(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class AppChange(msgspec.Struct, forbid_unknown_fields=True):
    """A field that is left out stays as it is; null resets it."""

    auth: Annotated[NewAuth | msgspec.UnsetType | None, msgspec.Meta(description=AUTH)] = msgspec.UNSET
    repository: Annotated[NewRepository | msgspec.UnsetType | None, msgspec.Meta(description=REPOSITORY)] = (
        msgspec.UNSET
    )
    build: Annotated[Build | msgspec.UnsetType | None, msgspec.Meta(description=BUILD)] = msgspec.UNSET


class AppSettings(msgspec.Struct):
    """The account holder's settings of an app, without the auth secret and the repository's credentials."""

    auth: dict[str, Any]
    repository: OwnRepository | None
    build: Build | None

    @classmethod
    def of(cls, app: App) -> Self:
        view = None
        if (repository := app.repository) is not None:
            view = OwnRepository(repository.url, repository.branch or None, hasCredentials=bool(repository.credentials))
        return cls(view_auth(app.auth), view, app.build)


class ChangedSettings(AppSettings):
    authCheck: AuthCheck | msgspec.UnsetType = msgspec.UNSET  # if the request has `auth`


class Apps:
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        app_changes: AppChanges,
        deploy_records: DeployRecords,
        users: Users,
        removal: Removal,
    ) -> None:
        self._settings, self._registry, self._app_changes = settings, registry, app_changes
        self._deploy_records, self._users, self._removal = deploy_records, users, removal

    async def create(self, account: Account, name: str) -> AccountApp:
        """Raises RequestMalformed, RateLimited, AppLimitReached and NameTaken."""
        check_name(name)
        check_new_name(name)
        if f"{name}.{apps_host(self._settings)}" in service_hosts(self._settings):
            raise RequestMalformed("name: this is the service's own address; choose another name.")
        # Unlike an operators' app, it has an id of its own: the next app with this name inherits nothing.
        app_id = new_id("app").replace("_", "-")
        app = App(id=app_id, name=name, account=account.id, createdAt=now_iso())
        await self._app_changes.create_app(app, self._settings.app_limits[account.plan])
        [view] = await self._view(account, [app])
        return view

    async def show(self, account: Account, app: App) -> AppDetails:
        [listed] = await self._view(account, [app])
        return AppDetails(
            **msgspec.structs.asdict(listed),
            createdAt=app.createdAt,
            liveDeploy=await self._deploy_records.find_live_id(app),
            repository=view_repository(app),
            build=app.build,
            certificate=await self._read_certificate(app),
            healthDays=await history.read_history(self._registry.store, account.id, app.id),
        )

    async def change(self, app: App, change: AppChange) -> ChangedSettings:
        """Saves a new `auth` in any case, and then checks it. Raises RequestMalformed, RateLimited and NotFound."""
        await CHANGES.count(self._registry.store, app.account)
        vault, allow_private = self._registry.vault, self._settings.allow_private_addresses
        changes: dict[str, Any] = {}
        if change.auth is not msgspec.UNSET:
            auth = change.auth or JwksAuth()
            changes["auth"] = check_auth(auth, vault, allow_private=allow_private, save_internal=True)
        if change.repository is not msgspec.UNSET:
            repository = check_repository(change.repository, vault, allow_private=allow_private)
            changes["repository"] = _keep_credentials(repository, app.repository)
        if change.build is not msgspec.UNSET:
            changes["build"] = check_build(change.build)
        if changes:
            app = await self._registry.change_app(app, lambda record: set_fields(record, changes))
        changed = ChangedSettings.of(app)
        if change.auth is not msgspec.UNSET:
            changed.authCheck = await check_verification(self._users, app, allow_private=allow_private)
        return changed

    async def check_token(self, app: App, token: str) -> TokenCheck:
        """Checks a token of the app's user. Raises RateLimited and TokensLimited."""
        await TOKEN_CHECKS.count(self._registry.store, app.account)
        return await self._users.check(app, token.strip().encode())

    async def delete(self, app: App) -> None:
        """Raises AppSuspended, RateLimited and NotFound."""
        if app.suspension is not None:
            raise AppSuspended("A suspended app can't be deleted; ask the operator to lift the suspension first.")
        await CHANGES.count(self._registry.store, app.account)
        await self._removal.remove(app)

    async def change_limits(self, account: Account, app: App, change: LimitsChange) -> LimitsView:
        """Raises RequestMalformed and NotFound."""
        changes = {name: value for name, value in msgspec.structs.asdict(change).items() if value is not msgspec.UNSET}
        check_limits(changes, find_widest(app, account, self._settings), account)
        changed = await self._registry.change_limits(app, lambda limits: msgspec.structs.replace(limits, **changes))
        return LimitsView.of(changed)

    async def read_spend(self, account: Account, app: App) -> AppSpend:
        """Returns what the app has spent today."""
        limits = limits_of(app, account, self._settings)
        cap = limits.cap if limits.app_cap is None else min(limits.cap, limits.app_cap)
        spend = await read_spend(self._registry.store, account.id, app_spend_fields(app.id), cap)
        return AppSpend(**msgspec.structs.asdict(spend), widest=find_widest(app, account, self._settings))

    async def _read_certificate(self, app: App) -> CertificateView | None:
        key = certificate_key(partition_tag(app.account), app.id)
        certificates = read_certificates(await self._registry.store.client.hgetall(key))
        if not certificates:
            return None
        domain, first = min(certificates.items(), key=lambda each: each[1].expires)
        return CertificateView(domain, now_iso(first.expires / 1000), first.issuer or None)

    async def _view(self, account: Account, apps: Sequence[App]) -> list[AccountApp]:
        """Returns the apps in the same order."""
        monitored = await health.read_monitored_apps(self._registry.store, [(app, account) for app in apps])
        return [
            AccountApp(
                **msgspec.structs.asdict(state),
                url=live_url(app.name, self._settings),
                customDomain=app.customDomain,
                customDomainVerified=app.customDomainVerified,
                domains=view_domains(app),
                suspension=find_suspension(app, account) or msgspec.UNSET,
            )
            for app, state in zip(apps, monitored, strict=True)
        ]

    async def list(self, access: Access) -> list[AccountApp]:
        """Returns the apps that the caller may see, by name."""
        apps = [app for app in await self._registry.list_apps(access.account.id) if access.reaches(app.id)]
        return await self._view(access.account, apps)


def _keep_credentials(repository: Repository | None, before: Repository | None) -> Repository | None:
    """Keeps the credentials of a repository whose URL stays the same, unless new ones are given.

    No response shows them, so a client cannot send them again.
    """
    if repository is None or before is None or repository.credentials or repository.url != before.url:
        return repository
    return msgspec.structs.replace(repository, credentials=before.credentials)
