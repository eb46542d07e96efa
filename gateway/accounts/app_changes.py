"""Creates and deletes apps for account holders, who may send several requests at once.

An account's apps are created and deleted one at a time: each creation and deletion holds a lock in Redis, for less time
than the lock lives. So the plan's limit holds, and a name that is deleted and created at once belongs to one app.

For 30 days after a live app is deleted, only its account can use its name. Browsers of its visitors may still have data
that its pages stored, and would give it to another account's pages at the same address.

A new app inherits the rate window of an app that was deleted in the last minute. Otherwise an account could exceed the
rate limit of an app by deleting and creating apps.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from gateway.accounts import scripts
from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.cancellation import finish_despite_cancellation
from gateway.errors import (
    AppLimitReached,
    BackboneRefused,
    BackboneUnavailable,
    NameTaken,
)
from gateway.keys import (
    alias_key,
    app_changes_key,
    app_lock_key,
    app_window_key,
    deleted_apps_key,
    former_name_key,
    former_names_key,
    partition_tag,
    token_checks_key,
)
from gateway.loops import Allowance, held
from gateway.redis.scripts import compare_and_set

CHANGES = Allowance(app_changes_key, 120, 60, "An account can create, change and delete {limit} apps per minute")
TOKEN_CHECKS = Allowance(token_checks_key, 10, 60, "An account can check {limit} tokens per minute")
FORMER_NAME_SECONDS = 30 * 86_400
LOCK_SECONDS = 15
CHANGE_SECONDS = 10.0  # for a creation or a deletion
WAIT_SECONDS = 8.0  # for other creations and deletions of the account
POLL_SECONDS = 0.02


class AppChanges:
    def __init__(self, registry: Registry, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._registry, self._store, self._wait_seconds = registry, registry.store, wait_seconds
        # By account. One request of each process polls Redis for the lock; the others wait here.
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create_app(self, app: App, limit: int) -> None:
        """Creates an app, if its account has fewer than `limit`. Raises RateLimited, NameTaken and AppLimitReached."""
        await CHANGES.count(self._store, app.account)
        async with self._lock_apps(app.account):
            withheld_for = await self._store.get(former_name_key(app.name))
            if withheld_for not in (None, app.account) or await self._registry.find_app(app.name) is not None:
                raise NameTaken
            if len(await self._registry.list_apps(app.account)) >= limit:
                raise AppLimitReached(
                    f"Your plan allows {limit} app{'s' if limit > 1 else ''}; delete one, or choose a larger plan."
                )
            try:
                # The alias first: an app must be found by its id as soon as it is found by its name.
                await compare_and_set(self._store, alias_key(app.id), app.name)
                await self._registry.put_app(app, None)
                await self._inherit_window(app)
            except BaseException:  # perhaps another account was faster
                with contextlib.suppress(BackboneUnavailable):
                    await finish_despite_cancellation(self._registry.delete_app(app))
                raise

    async def withhold_name(self, app: App) -> None:
        """Withholds the name of a live app from other accounts after its deletion."""
        names = former_names_key(app.account)
        await self._store.client.sadd(names, app.name)
        await self._store.client.expire(names, FORMER_NAME_SECONDS)
        await self._store.client.set(former_name_key(app.name), app.account, ex=FORMER_NAME_SECONDS)

    async def delete_app(self, app: App) -> None:
        """Deletes an app; can be repeated. Raises NotFound if the app now belongs to another account."""
        async with self._lock_apps(app.account):
            await self._registry.delete_app(app)
            deleted = deleted_apps_key(app.account)
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.rpush(deleted, app.id)
                pipe.expire(deleted, 60)
                await pipe.execute()
            await scripts.forget_app(self._store, app.account, app.id, await self._store.today())

    async def _inherit_window(self, app: App) -> None:
        deleted, tag = deleted_apps_key(app.account), partition_tag(app.account)
        while (former := await self._store.client.lpop(deleted)) is not None:
            with contextlib.suppress(BackboneRefused):  # it had no requests
                await self._store.client.rename(app_window_key(tag, former), app_window_key(tag, app.id))
                return

    @asynccontextmanager
    async def _lock_apps(self, account_id: str) -> AsyncGenerator[None]:
        """Waits for the account's other creations and deletions, then excludes them. Raises BackboneUnavailable."""
        queue = self._queues.setdefault(account_id, asyncio.Lock())
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._wait_seconds):
                    await stack.enter_async_context(queue)
                async with asyncio.timeout(self._wait_seconds):
                    lock = held(self._store, app_lock_key(account_id), LOCK_SECONDS, POLL_SECONDS)
                    await stack.enter_async_context(lock)
                async with asyncio.timeout(CHANGE_SECONDS):
                    yield
        except TimeoutError:
            raise BackboneUnavailable(
                "Too many apps of this account are being created or deleted; try again shortly."
            ) from None
