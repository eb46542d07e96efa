"""The layout of the data: a number in Redis and one in the storage, and the steps from each layout to the next.

Gateways and workers bring both to `LAYOUT` before they serve. One process runs the steps and holds a lock in Redis,
which expires if the process dies; the others wait. The number is written after each step, so the next process continues
after the last complete step. Data without a number have layout 1: there are none yet, or they are older than the
numbers.

A step after which the version before still runs raises no layout, because that version would not start again during an
update, and nobody could return to it. Such steps are minor, and have a number of their own in Redis. If that number is
newer, or missing after a restore, it stops no process.

A record that the version before would read as more than it is, such as an API key with a scope, is kept where that
version does not find it, or also has what that version obeys, such as a suspension.

A step may be repeated, even while a stalled process still runs it, and it may find data that another run of it has
already changed. It leaves data that the version before can use, because both run during an update.

Failure policy: while Redis or the storage is unavailable, nothing is known about its layout, and the process starts.
A gateway is not ready until it knows the layout in Redis. The storage is looked at once, at the start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import structlog

from gateway.accounts import scripts
from gateway.accounts.records import Account
from gateway.errors import StorageUnavailable
from gateway.keys import (
    FORMER_HOSTS_KEYS,
    LAYOUT_KEY,
    LAYOUT_LOCK_KEY,
    LAYOUT_MINOR_KEY,
    PARTITION_TAGS,
    account_key,
    accounts_key,
    deletions_key,
    former_claims_key,
)
from gateway.loops import batched, held
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.settings import Settings
from gateway.storage import FolderStorage, Storage, find_folder_fault, open_storage, read_object

logger = structlog.get_logger()

EXIT_CODE = 78  # of a process that cannot run with its settings and these data (EX_CONFIG of sysexits.h)
NAME = "layout"  # of the object in the storage
NUMBER_BYTES = 100  # at most, of that object
LOCK_SECONDS = 30.0  # after the death of the process that runs the steps, until another one continues
POLL_SECONDS = 0.5  # of a process that waits
WAIT_SECONDS = 1_800.0  # that a process waits for the one that runs the steps
ACCOUNTS_AT_A_TIME = 50  # that a step changes concurrently
KEPT = ("sources/", "archives/", "logs/")  # folders of the storage that a service in use fills


class CannotRun(Exception):
    """The process cannot run here, and ends with `EXIT_CODE`. The message is a sentence for the operator."""


class LayoutFault(CannotRun):
    """This version cannot use the data."""


class LayoutStep(NamedTuple):
    """Changes the data of one layout to the next one. None where nothing changes."""

    redis: Callable[[Store], Awaitable[None]] | None = None
    storage: Callable[[Storage], Awaitable[None]] | None = None


async def remove_hosts(store: Store) -> None:
    """Removes what several hosts that serve apps had in Redis: one engine serves them now."""
    await store.client.delete(*FORMER_HOSTS_KEYS)
    await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.delete(former_claims_key(tag)))


async def move_scoped_keys(store: Store) -> None:
    """Moves API keys whose scope is not full to where a version that knows no scopes does not find them."""
    for tag in PARTITION_TAGS:
        accounts = await store.client.zrange(accounts_key(tag), 0, -1)
        for batch in batched(accounts, ACCOUNTS_AT_A_TIME):
            await asyncio.gather(*(scripts.move_scoped_keys(store, each) for each in batch))


async def suspend_leaving_accounts(store: Store) -> None:
    """Writes that accounts which are being deleted are suspended, for a version that knows no deletions."""

    async def compute(present: str) -> Change[None]:
        return Change(
            msgspec.json.encode(msgspec.json.decode(present, type=Account)).decode() if present else None, None
        )

    for tag in PARTITION_TAGS:
        for account_id in await store.client.zrange(deletions_key(tag), 0, -1):
            await change_record(store, account_key(account_id), compute)


STEPS: Sequence[LayoutStep] = (LayoutStep(redis=remove_hosts),)  # the first one leads from layout 1 to 2
MINOR_STEPS: Sequence[LayoutStep] = (LayoutStep(redis=move_scoped_keys), LayoutStep(redis=suspend_leaving_accounts))
LAYOUT = 1 + len(STEPS)

Work = Callable[[], Awaitable[None]]


class Numbered(Protocol):
    """Data that have a layout."""

    key: str  # of the number
    steps: list[Work | None]

    async def read(self) -> str:
        """Returns the number as it is stored, or '' if there is none."""

    async def write(self, number: int) -> None: ...


class RedisData:
    key = LAYOUT_KEY

    def __init__(self, store: Store, steps: Sequence[LayoutStep]) -> None:
        self._store = store
        self.steps: list[Work | None] = [step.redis and partial(step.redis, store) for step in steps]

    async def read(self) -> str:
        return await self._store.get(self.key) or ""

    async def write(self, number: int) -> None:
        await self._store.client.set(self.key, number)


class MinorData(RedisData):
    """The same data, with the number of their minor steps."""

    key = LAYOUT_MINOR_KEY

    async def read(self) -> str:
        """Returns a newer number as the one that this version knows."""
        return str(min(int(await super().read() or 0), 1 + len(self.steps)))


class StoredData:
    key = NAME

    def __init__(self, storage: Storage, steps: Sequence[LayoutStep]) -> None:
        self._storage = storage
        self.steps: list[Work | None] = [step.storage and partial(step.storage, storage) for step in steps]

    async def read(self) -> str:
        return (await read_object(self._storage, self.key, NUMBER_BYTES) or b"").decode(errors="replace").strip()

    async def write(self, number: int) -> None:
        await self._storage.put(self.key, f"{number}\n".encode())


async def prepare_data(settings: Settings) -> None:
    """Upgrades the data in Redis and in the storage, and warns if Redis has lost them.

    Raises LayoutFault, and BackboneUnavailable if Redis does not answer.
    """
    store = Store(settings.redis_url, ca_file=settings.ca_file)
    try:
        await upgrade_redis(store)
        storage = open_storage(settings)
        if isinstance(storage, FolderStorage) and not settings.storage_url and find_folder_fault(storage.folder):
            return  # the process reports it
        with suppress(StorageUnavailable):  # the storage has logged it
            await upgrade_storage(store, storage)
            await _warn_of_loss(store, storage)
    finally:
        await store.close()


async def upgrade_redis(
    store: Store,
    steps: Sequence[LayoutStep] | None = None,
    minor_steps: Sequence[LayoutStep] | None = None,
    *,
    lock_seconds: float = LOCK_SECONDS,
    wait_seconds: float = WAIT_SECONDS,
) -> None:
    """Raises LayoutFault and BackboneUnavailable."""
    await _upgrade(store, RedisData(store, STEPS if steps is None else steps), lock_seconds, wait_seconds)
    await _upgrade(
        store, MinorData(store, MINOR_STEPS if minor_steps is None else minor_steps), lock_seconds, wait_seconds
    )


async def upgrade_storage(store: Store, storage: Storage, steps: Sequence[LayoutStep] | None = None) -> None:
    """Raises LayoutFault, BackboneUnavailable and StorageUnavailable."""
    await _upgrade(store, StoredData(storage, STEPS if steps is None else steps))


async def _upgrade(
    store: Store, data: Numbered, lock_seconds: float = LOCK_SECONDS, wait_seconds: float = WAIT_SECONDS
) -> None:
    known = 1 + len(data.steps)
    while (number := parse_number(await data.read(), known)) != known:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(wait_seconds):
                    lock = held(store, LAYOUT_LOCK_KEY, lock_seconds, POLL_SECONDS)
                    lost = await stack.enter_async_context(lock)
            except TimeoutError:
                raise LayoutFault(
                    f"The data are of layout {number or 1}, and this version knows {known}: another process has been "
                    f"upgrading them for {wait_seconds / 60:.0f} minutes; look at its log, and start this one again."
                ) from None
            await _run_steps(data, lost)


def parse_number(text: str, known: int = LAYOUT) -> int:
    """Returns the number, or 0 if there is none. Raises LayoutFault if this version cannot use the data."""
    if text and not text.isdecimal():
        raise LayoutFault(
            f"The data are of layout {text!r}, and this version knows {known}: if a restore was interrupted, "
            "run it again; otherwise start the version that wrote them."
        )
    number = int(text or 0)
    if number > known:
        raise LayoutFault(
            f"The data are of layout {number}, and this version knows {known}: start the newer version that wrote "
            "them, or restore a backup of this version."
        )
    return number


async def _run_steps(data: Numbered, lost: asyncio.Event) -> None:
    """Runs the steps that are left, unless the lock gets lost."""
    known = 1 + len(data.steps)
    if not parse_number(await data.read(), known):
        await data.write(1)
    while (number := parse_number(await data.read(), known)) < known and not lost.is_set():
        logger.info("layout.upgrading", key=data.key, number=number, to=number + 1)
        if (work := data.steps[number - 1]) is not None:
            await work()
        await data.write(number + 1)


async def _warn_of_loss(store: Store, storage: Storage) -> None:
    """Logs a line if Redis knows no account although the storage has files of apps."""
    if any(await store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.zcard(accounts_key(tag)))):
        return
    for folder in KEPT:
        if await storage.list_folders(folder):
            action = "if Redis has lost its data, stop the service and restore a backup (docs/backup.md)"
            logger.error("redis.empty", folder=folder, action=action)
            return
