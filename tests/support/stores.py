"""Opens a store as a process does, and changes records as the routes do."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from gateway.accounts.records import Account
from gateway.accounts.registry import Registry
from gateway.keys import account_key
from gateway.redis.client import Store
from gateway.settings.model import Plan


@asynccontextmanager
async def opened(url: str, replicas: int = 0, **options: Any) -> AsyncIterator[Store]:
    store = Store(url, replicas=replicas, **options)
    try:
        yield store
    finally:
        await store.close()


async def add_accounts(store: Store, *account_ids: str) -> None:
    """Writes the records of accounts, without which nothing can be added to them."""
    for account_id in account_ids:
        account = Account(id=account_id, name=account_id, plan="free", createdAt="")
        await store.client.set(account_key(account_id), msgspec.json.encode(account), nx=True)


async def change_plan(registry: Registry, account_id: str, plan: Plan) -> Account:
    """Raises NotFound."""
    _, changed = await registry.change_account(account_id, lambda record: msgspec.structs.replace(record, plan=plan))
    return changed
