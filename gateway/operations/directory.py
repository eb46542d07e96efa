"""Lists all accounts and all apps for operators, a page at a time, and searches them.

Each partition has a sorted set of its accounts' ids and one of its apps' ids, all with the same score, so that Redis
returns them in the order of the ids. A page reads as much of each partition as it needs, and merges. A search reads the
records in this order until the page is full, and at most `SEARCHED` of them; `next` says where the next page begins.
So a page costs the same for any number of accounts, and no command scans Redis.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec
import structlog

from gateway.accounts.keys import account_key, accounts_key, apps_key
from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.monitors.keys import probes_key
from gateway.redis.client import until_redis_answers
from gateway.redis.partitions import PARTITION_TAGS

logger = structlog.get_logger()

SEARCHED = 2_000  # records for one page
BATCH = 200  # ids read from each partition at once
APPS = 500  # apps whose accounts are listed at once

R = TypeVar("R")
OwnedApp = tuple[App, Account]


class Page(msgspec.Struct, Generic[R]):
    rows: list[R]
    next: str | None  # id from which on more may be found


class Directory:
    def __init__(self, registry: Registry) -> None:
        self._registry, self._store = registry, registry.store

    async def accounts(self, search: str, limit: int, before: str | None) -> Page[Account]:
        """Newest first. `search` is part of a name or an id."""
        return await self._page(
            self._ids(accounts_key, before, BATCH if search else limit + 1, newest_first=True),
            self._read_accounts,
            lambda account: _contains(search, account.name, account.id),
            lambda account: account.id,
            limit,
        )

    async def apps(self, search: str, limit: int, after: str | None) -> Page[OwnedApp]:
        """By id. `search` is part of a name, an id, a custom domain, or the account's name or id."""
        return await self._page(
            self._ids(apps_key, after, BATCH if search else limit + 1, newest_first=False),
            self._read_apps,
            lambda row: _contains(search, row[0].name, row[0].id, row[0].customDomain or "", row[1].id, row[1].name),
            lambda row: row[0].id,
            limit,
        )

    async def _page(
        self,
        batches: AsyncIterator[list[str]],
        read: Callable[[Sequence[str]], Awaitable[list[R]]],
        matches: Callable[[R], bool],
        id_of: Callable[[R], str],
        limit: int,
    ) -> Page[R]:
        rows: list[R] = []
        searched, last = 0, None
        async with contextlib.aclosing(batches):  # type: ignore[type-var]
            async for ids in batches:
                for row in await read(ids):
                    if len(rows) == limit:
                        return Page(rows, last)
                    last = id_of(row)
                    if matches(row):
                        rows.append(row)
                searched, last = searched + len(ids), ids[-1]
                if searched >= SEARCHED:
                    return Page(rows, last)
        return Page(rows, None)

    # -- reading ---------------------------------------------------------------------------------------------

    async def _ids(
        self, key_of: Callable[[str], str], last: str | None, count: int, *, newest_first: bool
    ) -> AsyncIterator[list[str]]:
        """All ids after `last` in batches, each of at least `count` if there are so many."""
        start, end = ("+", "-") if newest_first else ("-", "+")
        while True:
            begin = start if last is None else f"({last}"
            async with self._store.client.pipeline(transaction=False) as pipe:
                for tag in PARTITION_TAGS:
                    pipe.zrange(key_of(tag), begin, end, desc=newest_first, bylex=True, offset=0, num=count)
                pages = await pipe.execute()
            found = sorted((each for page in pages for each in page), reverse=newest_first)[:count]
            if not found:
                return
            yield found
            last = found[-1]

    async def _read_accounts(self, ids: Sequence[str]) -> list[Account]:
        records = await self._store.get_all([account_key(each) for each in ids])
        return [msgspec.json.decode(record, type=Account) for record in records if record is not None]

    async def _read_apps(self, ids: Sequence[str]) -> list[OwnedApp]:
        found = await self._registry.by_ids(ids)
        return [found[each] for each in ids if each in found]

    # -- upgrading -------------------------------------------------------------------------------------------

    async def complete(self) -> None:
        """Lists the apps and accounts that an earlier version made, which listed none. Any process may repeat it.

        An account without apps is listed after the next use of one of its API keys.
        """
        try:
            await until_redis_answers(self._complete_all)
        except msgspec.DecodeError as error:
            logger.warning("directory.incomplete", error=str(error), action="the next process that starts repeats it")

    async def _complete_all(self) -> None:
        async with self._store.client.pipeline(transaction=False) as pipe:
            for tag in PARTITION_TAGS:
                pipe.zcard(accounts_key(tag))
            listed = await pipe.execute()
        for tag, count in zip(PARTITION_TAGS, listed, strict=True):
            if not count:
                await self._complete(tag)

    async def _complete(self, tag: str) -> None:
        client = self._store.client
        # The monitors have had a list of all apps in all versions.
        await client.zunionstore(apps_key(tag), {apps_key(tag): 0, probes_key(tag): 0})
        ids: list[str] = await client.zrangebylex(apps_key(tag), "-", "+")
        accounts: set[str] = set()
        for first in range(0, len(ids), APPS):
            accounts |= {account.id for _, account in await self._read_apps(ids[first : first + APPS])}
        if accounts:
            await client.zadd(accounts_key(tag), dict.fromkeys(accounts, 0))


def _contains(search: str, *texts: str) -> bool:
    return not search or any(search.casefold() in text.casefold() for text in texts)
