"""Apps whose addresses a test breaks and repairs, with a real monitor process."""

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gateway.accounts.records import App
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.ids import now_iso
from gateway.keys import (
    certificates_key,
    domain_checks_key,
    health_key,
    monitored_keys,
    partition_tag,
    probes_key,
    site_key,
)
from gateway.monitors import health
from tests.fakes.receiver import FakeReceiver, verified
from tests.fakes.server import Script, answer
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY
from tests.support.worker_process import Account, Queue, Worker, queue

DOWN: Script = answer(503)
UP: Script = answer(200, b"hello")


class Watched:
    """An app, and the events for its account."""

    def __init__(self, fleet: "Fleet", account: Account, app: App) -> None:
        self.fleet, self.account, self.app = fleet, account, app
        self.path = f"/{app.name}"

    def fails(self, script: Script = DOWN) -> None:
        self.fleet.site.plays(self.path, script)

    def heals(self) -> None:
        self.fleet.site.plays(self.path, UP)

    @property
    def probes(self) -> int:
        return len(self.fleet.site.got(self.path))

    async def probed(self, times: int = 2, timeout: float = 10) -> None:
        """Waits for `times` further probes."""
        until = self.probes + times
        await wait_until(lambda: self.probes >= until, timeout)

    async def health(self) -> health.AppHealth:
        client = self.fleet.queue.store.client
        return health.decode_health(await client.hget(health_key(partition_tag(self.account.id), self.app.id), "state"))

    async def until(self, status: str) -> None:
        await wait_until(self.health, 10, holds=lambda health: health.status == status)

    def envelopes(self) -> list[dict[str, Any]]:
        """Returns the received envelopes, after verifying each."""
        return [verified(each, self.account.secret) for each in self.fleet.receiver.got(f"/{self.account.id}")]

    def types(self) -> list[str]:
        return [envelope["type"] for envelope in self.envelopes()]

    async def receives(self, *types: str) -> None:
        await wait_until(lambda: self.types() == list(types), 10)

    async def goes_live(self) -> None:
        await self.fleet.queue.store.client.hset(site_key(self.account.id, self.app.id), "live", "dep_1")

    async def keys(self) -> list[str]:
        """Returns the app's keys of the monitors."""
        client, tag = self.fleet.queue.store.client, partition_tag(self.account.id)
        found = [key for key in monitored_keys(tag, self.app.id) if await client.exists(key)]
        for due in (probes_key(tag), certificates_key(tag), domain_checks_key(tag)):
            found += [due] if await client.zscore(due, self.app.id) is not None else []
        return found


class Fleet:
    def __init__(self, running: Queue, site: FakeReceiver, receiver: FakeReceiver) -> None:
        self.queue, self.site, self.receiver = running, site, receiver
        self.registry = Registry(running.store, Vault(ENCRYPTION_KEY))
        site.default = UP

    async def app(self, plan: str = "starter", *, live: bool = True, **fields: Any) -> Watched:
        """Creates an app of a new account, whose receiver is at `/<account>`."""
        record, key = await self.registry.create_account("One", plan)
        self.queue.confidential.add(key)
        account = Account(self.queue, record.id)
        await account.set(self.receiver.url(f"/{record.id}"))
        name = f"app-{secrets.token_hex(4)}"
        watched = Watched(self, account, App(id=name, name=name, account=record.id, createdAt=now_iso(), **fields))
        if live:
            await watched.goes_live()
        await self.registry.put_app(watched.app, None)
        return watched

    async def worker(self, *names: str, **settings: str) -> Worker:
        quick = {
            "GATEWAY_PROBE_INTERVAL": "0.1",
            "GATEWAY_PROBE_TIMEOUT": "1",
            "GATEWAY_PROBE_URL": self.site.url("/{app}"),
            "GATEWAY_UNHEALTHY_COOLDOWN": "60",
        }
        return await self.queue.worker(*(names or ("monitors", "webhooks")), **{**quick, **settings})


@contextlib.asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Runs a fleet on its own Valkey, without a worker yet."""
    async with queue(folder) as running, FakeReceiver() as site, FakeReceiver() as receiver:
        yield Fleet(running, site, receiver)
