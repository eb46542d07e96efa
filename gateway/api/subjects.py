"""Finds the account, app or deploy that a request names."""

from gateway.accounts.records import (
    Account,
    App,
)
from gateway.deploys.states import Deploy
from gateway.errors import (
    NotFound,
)
from gateway.services import Services


async def require_own_app(app: str, account: Account, services: Services) -> App:
    """Returns the account's app with this id or name. Raises NotFound."""
    found: App | None = await services.registry.find_app(app)
    if found is None or found.account != account.id:
        raise NotFound("There is no such app in this account.")
    return found


async def require_deploy(deploy_id: str, account: Account, services: Services) -> Deploy:
    """Returns the account's deploy with this id. Raises NotFound."""
    deploy = await services.deploys.get(deploy_id, account.id)
    if deploy is None or deploy.account != account.id:
        raise NotFound("There is no such deploy in this account.")
    return deploy


async def require_app(app: str, services: Services) -> App:
    """Returns the app with this id or name. Raises NotFound."""
    record: App | None = await services.registry.find_app(app)
    if record is None:
        raise NotFound
    return record


async def require_account(account_id: str, services: Services) -> Account:
    """Returns the account with this id. Raises NotFound."""
    account: Account | None = await services.registry.account(account_id)
    if account is None:
        raise NotFound("There is no such account.")
    return account
