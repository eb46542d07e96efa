"""A service with accounts, apps and files, and another one that is empty."""

import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import zstandard

from gateway.accounts.records import App, JwksAuth
from gateway.accounts.registry import Registry
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.deploys.hooks import Hooks
from gateway.deploys.release import Release
from gateway.deploys.serving import Wanted
from gateway.events.webhooks import Webhooks
from gateway.ids import now_iso
from gateway.inference.spend.limits import Limits
from gateway.inference.spend.scripts import admit, settle
from gateway.keys import deploy_key, deploys_key, partition_tag, serving_key, session_key, site_key, usage_key
from gateway.redis.client import Store
from gateway.settings import Settings
from gateway.storage import FolderStorage, Storage, open_storage
from tests.support.redis_servers import RedisServer
from workers.backup.run import Backup, Report
from workers.backup.target import BackupTarget, open_target

KEY = "an-encryption-key-of-32-characters"


class Service:
    """The data of one service, without its processes."""

    def __init__(self, url: str, folder: Path, **settings: str) -> None:
        self.settings = Settings(
            redis_url=url, data_dir=str(folder), **{"encryption_key": KEY, "allow_private_addresses": True, **settings}
        )
        self.folder, self.store = folder, Store(url)
        self.vault = Vault(KEY)
        self.registry = Registry(self.store, self.vault)
        self.webhooks = Webhooks(self.store, self.vault, allow_private=True)
        self.hooks, self.environments = Hooks(self.settings, self.registry), Environments(self.store, self.vault)
        self.storage: Storage = open_storage(self.settings)

    async def back_up(self, target: Path | str, *, keep: int = 0, **settings: str) -> Report:
        chosen = msgspec.structs.replace(self.settings, **settings)
        opened = BackupTarget(open_target(str(target), create=True), Vault(chosen.encryption_key))
        async with contextlib.aclosing(Backup(chosen, opened)) as backup:
            return await backup.make(keep)

    async def restore(self, target: Path | str, at: str = "", **options: bool | str) -> Report:
        key, unauthenticated = str(options.pop("key", KEY)), bool(options.pop("unauthenticated", False))
        settings = msgspec.structs.replace(self.settings, encryption_key=key)
        opened = BackupTarget(open_target(str(target)), Vault(key), unauthenticated=unauthenticated)
        async with contextlib.aclosing(Backup(settings, opened)) as backup:
            return await backup.restore(at, **options)

    # -- what is in it ---------------------------------------------------------------------------------------

    async def fill(self, accounts: int = 2) -> list[tuple[str, str, App]]:
        """Makes accounts with an app each. Returns their ids, API keys and apps."""
        made = []
        for number in range(accounts):
            account, key = await self.registry.create_account(f"Account {number}", "maker")
            name = f"app-{account.id[-8:]}"
            app = App(id=name, name=name, account=account.id, auth=JwksAuth(), createdAt=now_iso())
            app = await self.registry.put_app(app, None)
            await self.webhooks.set_receiver(account.id, "http://127.0.0.1:9/")
            await self.hooks.create(account.id, app.id, "ci")
            await self.environments.change_variables(app, {"COLOR": f"red {number}"})
            await self.environments.change_variables(app, {"COLOR": f"blue {number}"}, "preview")
            await self.serve(app, "dep_1")
            await self.store.client.hset(usage_key(account.id, "2026-07-02"), mapping={f"{app.id}/m/requests": "7"})
            await self.store.client.expire(usage_key(account.id, "2026-07-02"), 86_400)
            await self.store.client.set(session_key(f"{number}"), account.id, ex=600)
            made.append((account.id, key, app))
        return made

    async def serve(self, app: App, deploy: str, *, state: str = "live") -> None:
        """Writes the records and files of a deploy."""
        record = {"id": deploy, "account": app.account, "app": app.name, "appId": app.id, "kind": "live"}
        record |= {"state": state, "trigger": "upload", "createdAt": now_iso(), "address": "live"}
        await self.store.client.hset(deploy_key(app.account, deploy), mapping=record)
        await self.store.client.expire(deploy_key(app.account, deploy), 86_400)
        await self.store.client.zadd(deploys_key(app.account), {deploy: 1})
        await self.store.client.expire(deploys_key(app.account), 86_400)
        await self.store.client.hset(site_key(app.account, app.id), "live", "dep_1")
        if state != "live":
            await self.store.client.hset(site_key(app.account, app.id), "queued:live", deploy)
        releases = {name: Release("digest", 7) for name in {"dep_1", deploy}}
        step, served = ("live", "") if state == "live" else ("check", "dep_1")
        wanted = Wanted(app.account, app.id, "live", step, deploy, served, releases)
        await self.store.client.hset(serving_key(app.account, app.id), "live", msgspec.json.encode(wanted).decode())
        for key in (f"archives/{app.id}/{deploy}.tar.gz", f"sources/{app.id}/src_{deploy}.tar.gz"):
            await self.storage.put(key, f"{key} of {app.account}".encode())
        await self.storage.put(f"logs/2026-07-02/{deploy}-{app.id}.gz", b"log")

    async def spend(self, app: App, *, cost: int, reserve: int = 0) -> None:
        """Spends nano-euro, and reserves some."""
        for number, (amount, ends) in enumerate(((cost, True), (reserve, False))):
            if amount:
                limits, reservation = Limits(1_000, 1_000, 10**12), f"{app.id}-{number}-{amount}"
                given = {"reservation": reservation, "life": 60_000, "deadline": 0}
                decision = await admit(self.store, app.account, app.id, "ana", limits, amount, **given)
                assert decision.verdict == "ok"
                if ends:
                    await settle(self.store, partition_tag(app.account), reservation, amount)

    async def close(self) -> None:
        await self.store.close()


@pytest.fixture(scope="package")
def running_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    """Runs two Valkey servers with append-only files, and a Redis."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(RedisServer(name, folder=tmp_path_factory.mktemp("redis")))
            for name in ("valkey", "valkey", "redis")
        ]


@pytest.fixture
def servers(running_servers: list[RedisServer]) -> list[RedisServer]:
    """The servers without any keys."""
    for server in running_servers:
        with server.client() as client:
            client.flushall()
    return running_servers


@pytest_asyncio.fixture
async def service(servers: list[RedisServer], tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(servers[0].url, tmp_path / "data")
    yield made
    await made.close()


@pytest_asyncio.fixture
async def empty(servers: list[RedisServer], tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(servers[1].url, tmp_path / "other")
    yield made
    await made.close()


def objects_of(target: Path) -> list[Path]:
    return sorted(path for path in (target / "objects").rglob("*") if path.is_file())


def files_of(storage: FolderStorage) -> dict[str, bytes]:
    found = (path for path in storage.folder.rglob("*") if path.is_file() and path.name != "layout")
    return {str(path.relative_to(storage.folder)): path.read_bytes() for path in found}


class Forger:
    """Somebody who can write to the target of backups, and has no encryption key."""

    def __init__(self, target: Path) -> None:
        self.target = target

    @property
    def newest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self.newest_file.read_bytes())
        return manifest

    @property
    def newest_file(self) -> Path:
        return max((self.target / "backups").iterdir())

    def remove_newest(self) -> None:
        self.newest_file.unlink()

    def add(self, content: bytes) -> list[Any]:
        """Adds an object. Returns what a list or a backup says of it."""
        digest = hashlib.sha256(content).hexdigest()
        path = self.target / "objects" / digest[:2] / digest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return [digest, len(content)]

    def add_lines(self, *records: Any) -> list[Any]:
        lines = b"\n".join(json.dumps(record).encode() for record in records)
        return self.add(zstandard.ZstdCompressor().compress(lines))

    def read_lines(self, parts: list[Any]) -> list[Any]:
        packed = [(self.target / "objects" / digest[:2] / digest).read_bytes() for digest, _ in parts]
        return [
            json.loads(line) for each in packed for line in zstandard.ZstdDecompressor().decompress(each).splitlines()
        ]

    def write(self, manifest: Any, *, stamp: str = "") -> None:
        """Writes a backup that is newer than all others, unless it has another time."""
        text = manifest if isinstance(manifest, bytes) else json.dumps(manifest, separators=(",", ":")).encode()
        stamp = stamp or re.sub(r"[-:.]", "", manifest["at"])
        (self.target / "backups" / f"{stamp}-{hashlib.sha256(text).hexdigest()}.json").write_bytes(text)

    def forge(self, *, files: Sequence[Any] = (), records: Sequence[Any] = (), **fields: Any) -> None:
        """Writes a newer backup with more files and records than the newest one."""
        manifest = self.newest | {"at": "2999-01-01T00:00:00.000Z"} | fields
        if files:
            manifest["files"] = [self.add_lines(*self.read_lines(manifest["files"]), *files)]
        if records:
            manifest["records"] = [*manifest["records"], self.add_lines(*records)]
        self.write(manifest)


@pytest.fixture
async def target(service: Service, tmp_path: Path) -> Path:
    """A target with one backup, of a service with one account."""
    await service.fill(1)
    await service.back_up(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def forger(target: Path) -> Forger:
    return Forger(target)
