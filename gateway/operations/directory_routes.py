"""The operators' API: lists all accounts, apps and failed deploys, and shows an account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from litestar import get
from litestar.params import FromPath, QueryParameter

from gateway.accounts.api_keys import ListedKey
from gateway.accounts.keys import account_apps_key
from gateway.accounts.records import Account, Suspension
from gateway.deploys.addresses import live_url
from gateway.deploys.routes import DeployView
from gateway.errors import NotFound, RequestMalformed
from gateway.ids import Time
from gateway.inference.keys import spend_key
from gateway.inference.spend.limits import cap_of
from gateway.monitors import health
from gateway.monitors.health import HealthStatus, OpenFindings
from gateway.operations.directory import OwnedApp
from gateway.operations.needs_attention import list_failed_deploys, list_unhealthy_apps
from gateway.process import Gateway, Injected
from gateway.settings import Plan

Search = Annotated[str, QueryParameter(max_length=200)]
Limit = Annotated[int, QueryParameter(ge=1, le=100)]
Cursor = Annotated[str | None, QueryParameter(min_length=1, max_length=100)]


class ListedAccount(msgspec.Struct, kw_only=True):
    id: str
    name: str
    plan: Plan
    createdAt: Time
    apps: int
    settled: int  # nano-euro today
    reserved: int
    cap: int
    dailyEuro: str | None  # the account's own cap, in place of the plan's
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET


class AccountPage(msgspec.Struct):
    accounts: list[ListedAccount]
    next: str | None  # the `before` of the next page; null: this is the last page


class OperatorsApp(msgspec.Struct, kw_only=True):
    id: str
    name: str
    account: str
    accountName: str
    url: str
    createdAt: Time
    status: str
    health: HealthStatus
    healthSince: Time | None
    certificateExpiresAt: Time | None
    openFindings: OpenFindings
    suspension: Suspension | msgspec.UnsetType = msgspec.UNSET  # of the app itself
    accountSuspension: Suspension | msgspec.UnsetType = msgspec.UNSET


class AppPage(msgspec.Struct):
    apps: list[OperatorsApp]
    next: str | None  # the `after` of the next page; null: this is the last page


class AccountDetails(ListedAccount, kw_only=True):
    deploysToday: int
    deploysPerDay: int
    appList: list[OperatorsApp]
    keys: list[ListedKey]


class FailedDeploy(DeployView, kw_only=True):
    account: str


@get("/accounts", errors=[RequestMalformed])
async def list_accounts(
    gateway: Injected, search: Search = "", limit: Limit = 50, before: Cursor = None
) -> AccountPage:
    """List all accounts, newest first.

    `search` is part of a name or an id. A search reads 2,000 accounts at a time; `next` continues with the others.
    """
    page = await gateway.directory.list_accounts(search.strip(), limit, before)
    return AccountPage(await _list_accounts(page.rows, await gateway.store.today(), gateway), page.next)


@get("/accounts/{account_id:str}", errors=[NotFound])
async def show_account(account_id: FromPath[str], gateway: Injected) -> AccountDetails:
    """Show an account: its plan, spend, apps and API keys."""
    account = await gateway.registry.account(account_id)
    if account is None:
        raise NotFound
    day = await gateway.store.today()
    (listed,) = await _list_accounts([account], day, gateway)
    apps = [(app, account) for app in await gateway.registry.list_apps(account_id)]
    return AccountDetails(
        **msgspec.structs.asdict(listed),
        deploysToday=await gateway.deploys.count_today(account_id, day),
        deploysPerDay=gateway.settings.deploy_quotas[account.plan],
        appList=await _list_apps(apps, gateway),
        keys=await gateway.registry.api_keys.list(account_id),
    )


@get("/apps", errors=[RequestMalformed])
async def list_apps(
    gateway: Injected,
    search: Search = "",
    limit: Limit = 50,
    after: Cursor = None,
    only: Annotated[Literal["unhealthy"] | None, QueryParameter(name="health")] = None,
) -> AppPage:
    """List all apps, by id.

    `search` is part of a name, an id, a custom domain, or the account's name or id. A search reads 2,000 apps at a
    time; `next` continues with the others. `health=unhealthy` lists the apps that have been unhealthy the longest.
    """
    if only == "unhealthy":
        return AppPage(await _list_apps(await list_unhealthy_apps(gateway.registry, limit), gateway), None)
    page = await gateway.directory.list_apps(search.strip(), limit, after)
    return AppPage(await _list_apps(page.rows, gateway), page.next)


@get("/deploys/failed", errors=[RequestMalformed])
async def list_failed(gateway: Injected, limit: Limit = 50) -> list[FailedDeploy]:
    """List the deploys of all accounts that failed in the last 24 hours, newest first.

    At most 100 from each of the 16 partitions.
    """
    failed = await list_failed_deploys(gateway.store, limit)
    return [FailedDeploy.of(deploy, account=deploy.account) for deploy in failed]


async def _list_accounts(accounts: Sequence[Account], day: str, gateway: Gateway) -> list[ListedAccount]:
    async with gateway.store.client.pipeline(transaction=False) as pipe:
        for account in accounts:
            pipe.scard(account_apps_key(account.id))
            pipe.hmget(spend_key(account.id, day), ["settled", "reserved"])
        answers = await pipe.execute() if accounts else []
    return [
        ListedAccount(
            id=account.id,
            name=account.name,
            plan=account.plan,
            createdAt=account.createdAt,
            apps=apps,
            settled=int(settled or 0),
            reserved=int(reserved or 0),
            cap=cap_of(account, gateway.settings),
            dailyEuro=account.dailyEuro,
            suspension=account.suspension or msgspec.UNSET,
        )
        for account, apps, (settled, reserved) in zip(accounts, answers[::2], answers[1::2], strict=True)
    ]


async def _list_apps(apps: Sequence[OwnedApp], gateway: Gateway) -> list[OperatorsApp]:
    monitored = await health.read_monitored_apps(gateway.store, apps)
    return [
        OperatorsApp(
            id=app.id,
            name=app.name,
            account=account.id,
            accountName=account.name,
            url=live_url(app.name, gateway.settings),
            createdAt=app.createdAt,
            suspension=app.suspension or msgspec.UNSET,
            accountSuspension=account.suspension or msgspec.UNSET,
            **msgspec.structs.asdict(state),
        )
        for (app, account), state in zip(apps, monitored, strict=True)
    ]


HANDLERS = [list_accounts, show_account, list_apps, list_failed]  # for the router in `routes.py`
