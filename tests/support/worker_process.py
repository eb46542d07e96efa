"""Runs workers as processes, and webhook workers on their own Redis server."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from gateway.accounts.records import App
from gateway.accounts.vault import Vault
from gateway.events import catalog
from gateway.events.deliveries import list_deliveries
from gateway.events.webhooks import Webhooks
from gateway.keys import PARTITION_TAGS, partition_tag
from gateway.redis.client import Store
from tests.fakes.receiver import FakeReceiver
from tests.support.key_leaks import assert_no_leak, find_keys
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY, ServiceProcess
from tests.support.redis_servers import RedisServer

CRASH = catalog.AppCrashed(reason="oom", exitCode=137, at="2026-07-02T10:00:00.000Z")


class Worker(ServiceProcess):
    """A process with the workers of these names: `async with Worker(…):` runs it, and fails if it does not end well."""

    def __init__(
        self,
        redis_url: str,
        folder: Path,
        *names: str,
        confidential: set[str] | None = None,
        constants: Mapping[str, float] = {},
        prefix: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.names = names or ("webhooks",)
        settings = {"GATEWAY_REDIS_URL": redis_url, "GATEWAY_WEBHOOK_CLAIM_IDLE": "10", **settings}
        log_file = folder / f"worker-{secrets.token_hex(4)}.log"
        super().__init__(log_file, set() if confidential is None else confidential, constants, prefix, settings)

    async def start(self) -> Self:
        self.launch("workers", *self.names)
        await wait_until(lambda: "workers.started" in self.log or self.code is not None, 60)
        assert self.code is None, self.log
        return self

    async def joined(self) -> Self:
        """Waits until the worker has a name that is registered in Redis."""
        await wait_until(lambda: "stream.joined" in self.log, 60)
        return self

    async def serving(self) -> Self:
        """Waits until a worker with `sites` serves them."""
        await wait_until(lambda: "sites.serving" in self.log, 60)
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            return self.kill()
        assert await self.stop() in (0, None), self.log  # None if the test has killed it
        self.assert_log_is_clean()


class Account:
    def __init__(self, queue: "Queue", account_id: str) -> None:
        self.queue, self.id = queue, account_id
        self.app = App(id=f"app-{account_id[-8:]}", name=f"app-{account_id[-8:]}", account=account_id, createdAt="")
        self.secret = ""

    async def set(self, url: str) -> Self:
        _, secret = await self.queue.webhooks.set_receiver(self.id, url)
        if secret is not None:
            self.secret = secret
            self.queue.confidential.add(secret)
        return self

    async def emit(self, event: catalog.Event = CRASH) -> str:
        return await self.queue.webhooks.emit(self.app, event)

    async def emit_many(self, count: int) -> list[str]:
        ids = []
        for first in range(0, count, 500):
            ids += await asyncio.gather(*(self.emit() for _ in range(min(500, count - first))))
        return ids

    async def log(self, limit: int = 1000) -> list[dict[str, Any]]:
        return msgspec.to_builtins(await list_deliveries(self.queue.store, self.id, limit))

    async def outcome(self, event_id: str, timeout: float = 10) -> tuple[str, str | int | None]:
        """Waits for an event's outcome. Returns it with its reason or the status of the delivery."""

        async def known() -> dict[str, Any] | None:
            return next((row for row in await self.log() if row["id"] == event_id), None)

        row = await wait_until(known, timeout)
        return row["outcome"], row.get("error") or row.get("status")


class Queue:
    """The gateway's side of the events' streams on one server, and the workers on it."""

    redis: RedisServer

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.confidential: set[str] = set()
        self.store = Store(url)
        self.webhooks = Webhooks(self.store, Vault(ENCRYPTION_KEY), allow_private=True)
        self.workers: list[Worker] = []

    async def worker(self, *names: str, url: str | None = None, **options: Any) -> Worker:
        worker = Worker(url or self.url, self.folder, *names, confidential=self.confidential, **options)
        self.workers.append(worker)
        return await worker.start()

    def unset_account(self, accepts: Callable[[str], bool] = bool) -> Account:
        """Creates an account without a receiver, in a partition that `accepts` the caller's condition."""
        ids = iter(lambda: f"acc_{secrets.token_hex(8)}", None)
        return next(Account(self, account_id) for account_id in ids if accepts(partition_tag(account_id)))

    async def account(self, receiver: FakeReceiver | str, path: str | None = None) -> Account:
        """Creates an account with its own path at the receiver, by default `/<account>`."""
        account = self.unset_account()
        return await account.set(receiver if isinstance(receiver, str) else receiver.url(path or f"/{account.id}"))

    async def waiting(self) -> int:
        """Returns the number of events without an outcome."""
        lengths = [await self.store.client.xlen(f"{tag}:events") for tag in PARTITION_TAGS]
        return sum(lengths)

    async def drained(self, timeout: float = 10, left: int = 0) -> None:
        """Waits until at most `left` events have no outcome."""
        await wait_until(self.waiting, timeout, holds=lambda number: number <= left)

    async def outcomes(self) -> dict[str, int]:
        """Returns the number of deliveries with each outcome and reason."""
        found: dict[str, int] = {}
        for tag in PARTITION_TAGS:
            for name, count in (await self.store.client.hgetall(f"{tag}:outcomes")).items():
                found[name] = found.get(name, 0) + int(count)
        return found

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        await self.store.close()


@contextlib.asynccontextmanager
async def queue(folder: Path, *, durable: bool = False) -> AsyncIterator[Queue]:
    """Yields a queue on its own Valkey (`.redis`), which is searched at the end for secrets and leaked keys."""
    if durable:
        (folder / "redis").mkdir()
    server = RedisServer("valkey", folder=folder / "redis" if durable else None).start()
    running = Queue(server.url, folder)
    running.redis = server
    try:
        yield running
        for worker in running.workers:
            worker.assert_log_is_clean()
        with server.client() as client:
            found = find_keys(client, *running.confidential)
            assert not found, f"a secret is in {[*found]}"
            assert_no_leak(client)
    finally:
        await running.close()
        server.stop()
