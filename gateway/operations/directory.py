"""Lists all accounts and all apps for operators in pages, and searches them.

Each partition has a sorted set of its accounts' ids and one of its apps' ids, all with the same score, so that Redis
returns them in the order of the ids. A page reads as many ids of each partition as it needs, and merges them. A search
or a filter reads the records in this order until the page is full or it has read `MAX_SEARCHED` of them. `next` is
where the next page begins. So a page costs the same for any number of accounts, and no command scans Redis. The
accounts by their spend come from the sorted set of the day's spenders.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from gateway.accounts.records import Account, App
from gateway.accounts.registry import Registry
from gateway.keys import PARTITION_TAGS, account_key, accounts_key, apps_key, spenders_key
from gateway.settings import Plan
from gateway.telemetry.counters import TOTAL

MAX_SEARCHED = 2_000  # records for one page
IDS_PER_READ = 200  # from each partition

R = TypeVar("R")
OwnedApp = tuple[App, Account]
Sort = Literal["newest", "spend"]


class Page(msgspec.Struct, Generic[R]):
    rows: list[R]
    next: str | None  # id after which the next page begins


class Directory:
    def __init__(
        self, registry: Registry, *, max_searched: int = MAX_SEARCHED, ids_per_read: int = IDS_PER_READ
    ) -> None:
        self._registry, self._store = registry, registry.store
        self._max_searched, self._ids_per_read = max_searched, ids_per_read

    async def list_accounts(
        self,
        search: str,
        limit: int,
        before: str | None,
        *,
        plan: Plan | None = None,
        suspended: bool | None = None,
        sort: Sort = "newest",
    ) -> Page[Account]:
        """Returns accounts, newest first, or only those that spent something today, the highest spend first.

        `search` is part of a name or an id.
        """
        chosen = bool(search) or plan is not None or suspended is not None
        size = self._ids_per_read if chosen else limit + 1
        if sort == "spend":
            batches = self._list_spenders(before, size)
        else:
            batches = self._list_ids(accounts_key, before, size, newest_first=True)

        def matches(account: Account) -> bool:
            return (
                plan in (None, account.plan)
                and suspended in (None, account.suspension is not None)
                and _contains(search, account.name, account.id)
            )

        return await self._read_page(batches, self._read_accounts, matches, lambda account: account.id, limit)

    async def list_apps(self, search: str, limit: int, after: str | None) -> Page[OwnedApp]:
        """Returns apps by id. `search` is part of a name, an id, a custom domain, or the account's name or id."""
        return await self._read_page(
            self._list_ids(apps_key, after, self._ids_per_read if search else limit + 1, newest_first=False),
            self._read_apps,
            lambda row: _contains(
                search, row[0].name, row[0].id, *(each.name for each in row[0].domains), row[1].id, row[1].name
            ),
            lambda row: row[0].id,
            limit,
        )

    async def _read_page(
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
                if searched >= self._max_searched:
                    return Page(rows, last)
        return Page(rows, None)

    # -- reading ---------------------------------------------------------------------------------------------

    async def _list_ids(
        self, key_of: Callable[[str], str], last: str | None, count: int, *, newest_first: bool
    ) -> AsyncIterator[list[str]]:
        """Yields all ids after `last` in batches of `count`."""
        start, end = ("+", "-") if newest_first else ("-", "+")

        async def read(begin: str) -> list[str]:
            options = {"desc": newest_first, "bylex": True, "offset": 0, "num": count}
            pages = await self._store.read_each(
                PARTITION_TAGS, lambda pipe, tag: pipe.zrange(key_of(tag), begin, end, **options)
            )
            return sorted((each for page in pages for each in page), reverse=newest_first)[:count]

        begin = start if last is None else f"({last}"
        while found := await read(begin):
            yield found
            begin = f"({found[-1]}"

    async def _list_spenders(self, last: str | None, count: int) -> AsyncIterator[list[str]]:
        """Yields the accounts that spent something today after `last`, the highest spend first."""
        client, key = self._store.client, spenders_key(await self._store.today())
        rank = -1 if last is None else await client.zrevrank(key, last)
        while rank is not None and (found := await client.zrevrange(key, rank + 1, rank + count)):
            if accounts := [each for each in found if each != TOTAL]:
                yield accounts
            rank += len(found)

    async def _read_accounts(self, ids: Sequence[str]) -> list[Account]:
        records = await self._store.get_all([account_key(each) for each in ids])
        return [msgspec.json.decode(record, type=Account) for record in records if record is not None]

    async def _read_apps(self, ids: Sequence[str]) -> list[OwnedApp]:
        found = await self._registry.read_apps(ids)
        return [found[each] for each in ids if each in found]


def _contains(search: str, *texts: str) -> bool:
    return not search or any(search.casefold() in text.casefold() for text in texts)
