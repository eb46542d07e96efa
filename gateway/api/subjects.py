"""Finds the account, app or deploy that a request names."""

from gateway.accounts.records import (
    Account,
    App,
)
from gateway.accounts.registry import Registry
from gateway.deploys.states import Deploy, Deploys
from gateway.errors import (
    NotFound,
)


async def require_own_app(app: str, account: Account, registry: Registry) -> App:
    """Returns the account's app with this id or name. Raises NotFound."""
    found: App | None = await registry.find_app(app)
    if found is None or found.account != account.id:
        raise NotFound("There is no such app in this account.")
    return found


async def require_deploy(deploy_id: str, account: Account, deploys: Deploys) -> Deploy:
    """Returns the account's deploy with this id. Raises NotFound."""
    deploy = await deploys.get(deploy_id, account.id)
    if deploy is None or deploy.account != account.id:
        raise NotFound("There is no such deploy in this account.")
    return deploy


async def require_app(app: str, registry: Registry) -> App:
    """Returns the app with this id or name. Raises NotFound."""
    record: App | None = await registry.find_app(app)
    if record is None:
        raise NotFound
    return record


async def require_account(account_id: str, registry: Registry) -> Account:
    """Returns the account with this id. Raises NotFound."""
    account: Account | None = await registry.account(account_id)
    if account is None:
        raise NotFound("There is no such account.")
    return account
