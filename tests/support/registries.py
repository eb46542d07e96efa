"""Registries of two processes on one Redis, and the apps that they share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.errors import BackboneUnavailable
from gateway.keys import account_key
from gateway.redis import servers
from tests.support.background import in_background
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.stores import add_accounts, opened

KEY = "k" * 32
ACCOUNTS = "acc_one", "acc_two"
ACCOUNT_KEYS = {account_key(account_id) for account_id in ACCOUNTS}  # which a process adds


@asynccontextmanager
async def process(url: str, subscription_url: str = "", **options: Any) -> AsyncIterator[Registry]:
    """Yields a process's registry. Its subscription can use another URL than its commands."""
    async with opened(url, **options) as store:
        store._servers = servers.parse(subscription_url or url)
        registry = Registry(store, Vault(KEY))
        with suppress(BackboneUnavailable):
            await add_accounts(store, *ACCOUNTS)
        async with in_background(registry.cache.follow_changes()):
            await wait_until(lambda: registry.cache.is_current)
            yield registry


def an_app(name: str = "shop", account: str = "acc_one", **fields: object) -> App:
    return App(**{"id": name, "name": name, "account": account, "createdAt": "", **fields})  # type: ignore[arg-type]


async def wait_for_change(registry: Registry, changed: App) -> None:
    """Waits until the registry returns the changed app."""

    async def is_changed() -> bool:
        with suppress(BackboneUnavailable):  # a connection of the pool that was cut
            return await registry.app(changed.name) == changed
        return False

    await wait_until(is_changed, PATIENCE_SECONDS)
