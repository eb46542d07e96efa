"""The account, app or deploy that a request names, and the caller's account, as dependencies of the routes."""

from litestar.di import NamedDependency, Provide
from litestar.params import FromPath

from gateway.accounts.access import Access
from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.deploys.records import Deploy, DeployRecords
from gateway.errors import NotFound
from gateway.services import Injected

CallerAccess = NamedDependency[Access]  # `access`: what the API key or the session may do
Caller = NamedDependency[Account]  # `account`: that of the API key or the session
OwnApp = NamedDependency[App]  # `own_app`: the caller's app with this id or name
OwnDeploy = NamedDependency[Deploy]  # `own_deploy`: the caller's deploy with this id
AnyApp = NamedDependency[App]  # `any_app`, for operators
AnyAccount = NamedDependency[Account]  # `any_account`, for operators


async def require_own_app(app: FromPath[str], access: CallerAccess, registry: Injected[Registry]) -> App:
    """Returns the account's app with this id or name. Raises NotFound, and NotPermitted for a key of another app."""
    found: App | None = await registry.find_app(app)
    if found is None or found.account != access.account.id:
        raise NotFound("There is no such app in this account.")
    access.require_app(found.id)
    return found


async def require_deploy(
    deploy_id: FromPath[str], access: CallerAccess, deploy_records: Injected[DeployRecords]
) -> Deploy:
    """Returns the account's deploy with this id. Raises NotFound, and NotPermitted for a key of another app."""
    deploy = await deploy_records.get(deploy_id, access.account.id)
    if deploy is None or deploy.account != access.account.id:
        raise NotFound("There is no such deploy in this account.")
    access.require_app(deploy.appId)
    return deploy


async def require_app(app: FromPath[str], registry: Injected[Registry]) -> App:
    """Returns the app with this id or name. Raises NotFound."""
    found: App | None = await registry.find_app(app)
    if found is None:
        raise NotFound
    return found


async def require_account(account_id: FromPath[str], registry: Injected[Registry]) -> Account:
    """Returns the account with this id. Raises NotFound."""
    account: Account | None = await registry.account(account_id)
    if account is None:
        raise NotFound("There is no such account.")
    return account


ACCOUNT_RESOURCES = {"own_app": Provide(require_own_app), "own_deploy": Provide(require_deploy)}
OPERATOR_RESOURCES = {"any_app": Provide(require_app), "any_account": Provide(require_account)}
