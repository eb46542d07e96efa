"""A service that is backed up and restored: what comes back, what is refused, and what happens in between."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.accounts.api_keys import digest
from gateway.accounts.vault import Vault
from gateway.deploys.environment import Environments
from gateway.errors import BackboneUnavailable
from gateway.keys import (
    BACKUP_KEY,
    LAYOUT_KEY,
    LAYOUT_MINOR_KEY,
    PROCESSES_KEY,
    deploy_key,
    invitations_key,
    invited_by_key,
    kind_of,
    memberships_key,
    serving_key,
    site_key,
    spend_key,
    worker_key,
)
from gateway.operations.layout import LAYOUT, LayoutFault, upgrade_redis
from gateway.operations.sealed import reseal_all
from gateway.settings import NANO
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.receiver import FakeReceiver
from tests.support import redis_servers
from tests.support.background import in_background
from tests.support.deployment import Host, host_on
from tests.support.folders import passable_folder
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.s3_server import BUCKET, S3Server
from tests.workers.backup.conftest import KEY, Forger, Service, files_of, objects_of
from workers.backup import files, run
from workers.backup.run import Backup, BackupRefused
from workers.backup.target import BackupManifest, BackupTarget, BadBackup, open_target
from workers.engine.app_data import AppData


def content(server: RedisServer) -> dict[str, Any]:
    """Returns all keys that a backup has, with their contents."""
    read = {"string": "get", "hash": "hgetall", "set": "smembers", "list": "lrange", "zset": "zrange"}
    with redis.Redis(port=server.port, decode_responses=True) as client:
        found = {}
        for key in client.scan_iter(count=1000):
            kind = client.type(key)
            if kind in read:
                more = {"list": (0, -1), "zset": (0, -1)}.get(kind, ())
                found[key] = getattr(client, read[kind])(key, *more)
        return found


def lacks(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {kind_of(key) for key in before if before[key] != after.get(key)}


LEFT_OUT = {"session", "{ops}"}
LACKS_KEY = r"^GATEWAY_ENCRYPTION_KEY lacks a key that the backup needs"


async def test_all_of_it_comes_back(
    service: Service, servers: list[RedisServer], spool_folders: list[Path], tmp_path: Path
) -> None:
    """From a Valkey to a Redis. And it stays after a restart: a dump beside an append-only file would be ignored."""
    server = servers[2]
    await upgrade_redis(service.store)
    made = await service.fill()
    await service.storage.put("data/app/snapshots/snp_1.tar.gz", b"snapshot")
    (service.folder / "data" / "app" / "files").mkdir()
    (service.folder / "data" / "app" / "files" / "database").write_text("changes while it is read")
    (service.folder / "caddy" / "certificates").mkdir(parents=True)
    (service.folder / "caddy" / "certificates" / "apps.key").write_text("certificate")
    (service.folder / "caddy" / "caddy.log").write_text("log")
    report = await service.back_up(tmp_path / "target")
    assert await service.store.get(BACKUP_KEY) == report.manifest.at
    assert (report.manifest.accounts, report.manifest.apps, report.notes) == (2, 2, [])
    other = Service(server.url, tmp_path / "other")
    await other.restore(tmp_path / "target")
    assert spool_folders == [tmp_path / "target", other.folder], "a target may be read-only for a restore"
    server.kill()
    server.start()
    assert lacks(content(servers[0]), content(server)) == LEFT_OUT | {LAYOUT_MINOR_KEY}
    assert await other.store.get(LAYOUT_KEY) == str(LAYOUT)
    await upgrade_redis(other.store)
    expected = files_of(service.storage)
    del expected["caddy/caddy.log"], expected["data/app/files/database"]
    assert files_of(other.storage) == expected
    for account, key, app in made:
        assert (await other.registry.api_keys.identify(key)).account == account
        assert await other.environments.open_variables(app) == await service.environments.open_variables(app)
        assert (await other.environments.open_variables(app, "preview"))["COLOR"].startswith("blue")
        assert (await other.webhooks.find_receiver(account)) == (await service.webhooks.find_receiver(account))
    await other.close()


async def test_expiries_stay_deploys_in_progress_are_canceled_and_broken_records_are_as_they_were(
    service: Service, empty: Service, tmp_path: Path
) -> None:
    (account, _, app), (_, _, other) = await service.fill()
    await service.serve(app, "dep_2", state="checking")
    before = await service.store.client.pexpiretime(deploy_key(account, "dep_1"))
    await service.store.client.set("former-name:soon", "x", px=300)
    broken = {serving_key(other.account, other.id): "live", spend_key(account, "2026-07-02"): "reserved"}
    for key, field in broken.items():
        await service.store.client.hset(key, field, "broken")
        await service.store.client.expire(key, 600)
    await service.store.client.set("app:broken", "{")
    await service.back_up(tmp_path / "target")
    await asyncio.sleep(0.5)
    await empty.restore(tmp_path / "target")
    client = empty.store.client
    assert abs(await client.pexpiretime(deploy_key(account, "dep_1")) - before) < 100
    assert await client.ttl(site_key(account, app.id)) == -1
    assert await empty.store.get("former-name:soon") is None

    states = [await client.hget(deploy_key(account, deploy), "state") for deploy in ("dep_1", "dep_2")]
    assert states == ["live", "canceled"]
    assert "queued:live" not in await client.hgetall(site_key(account, app.id))
    served = await client.hget(serving_key(account, app.id), "live")
    assert '"deploy":"dep_1"' in served
    assert '"step":"live"' in served

    assert await empty.store.get("app:broken") == "{"
    for key, field in broken.items():
        assert await client.hget(key, field) == "broken"


async def test_money_of_the_day_is_never_less(service: Service, empty: Service, tmp_path: Path) -> None:
    (account, _, app), (poor, _, _) = await service.fill()
    await service.spend(app, cost=700, reserve=300)
    await service.back_up(tmp_path / "target")
    await empty.restore(tmp_path / "target")
    day = await empty.store.today()
    spent = {"settled": "1000", f"settled:{app.id}": "1000"}
    assert await empty.store.client.hgetall(spend_key(account, day)) == spent
    await empty.restore(tmp_path / "target", force=True, spent_today=True)
    assert await empty.store.client.hget(spend_key(account, day), "settled") == str(2 * NANO)
    assert await empty.store.client.hget(spend_key(poor, day), "settled") == str(2 * NANO)
    assert await empty.store.client.ttl(spend_key(poor, day)) > 86_400


async def test_a_dry_run_writes_nothing(
    service: Service, empty: Service, servers: list[RedisServer], target: Path
) -> None:
    report = await empty.restore(target, dry_run=True)
    assert (report.manifest.accounts, report.manifest.apps, report.notes) == (1, 1, [])
    assert (content(servers[1]), files_of(empty.storage)) == ({}, {})
    before = content(servers[0]), files_of(service.storage)
    with pytest.raises(BackupRefused, match="not empty"):
        await service.restore(target, dry_run=True)
    report = await service.restore(target, dry_run=True, force=True, spent_today=True)
    assert report.notes == ["a restore would replace the accounts that are here: 1"]
    assert (content(servers[0]), files_of(service.storage)) == before
    await empty.restore(target)  # which nothing of the dry run keeps from it


async def test_a_member_who_was_added_during_a_backup(service: Service, empty: Service, tmp_path: Path) -> None:
    (account, *_), (other, *_) = await service.fill()
    await service.registry.members.put(account, "ada@example.com", "owner")
    await service.registry.members.set_role(account, "bob@example.com", "viewer", "ada@example.com")
    await service.registry.members.set_role(other, "bob@example.com", "viewer", "API key")
    for key in (memberships_key(digest("ada@example.com")), invited_by_key(digest("bob@example.com"))):
        await service.store.client.delete(key)  # copied before
    await service.back_up(tmp_path / "target")
    await empty.restore(tmp_path / "target")
    [membership] = await empty.registry.members.list_accounts("ada@example.com")
    assert (membership.account.id, membership.role) == (account, "owner")
    invitations = await empty.registry.members.list_invitations("bob@example.com")
    assert {each.account for each in invitations} == {account, other}
    assert (
        0 < await empty.store.client.ttl(invitations_key(account)) <= 14 * 86_400 + 1
    )  # a part of a second counts as one


# -- what is refused, and leaves everything as it was --------------------------------------------------------


async def test_another_key(service: Service, empty: Service, servers: list[RedisServer], tmp_path: Path) -> None:
    await service.fill()
    await service.back_up(
        tmp_path / "target", encryption_key="another-key-that-came-first,an-encryption-key-of-32-characters"
    )
    for key in ("a-wrong-key-of-32-characters-xxxx", "an-encryption-key-of-32-characters"):
        with pytest.raises(
            BadBackup, match=r"was made with none of the keys in GATEWAY_ENCRYPTION_KEY, or was changed"
        ):
            await empty.restore(tmp_path / "target", key=key, force=True)
        with pytest.raises(BackupRefused, match=LACKS_KEY):
            await empty.restore(tmp_path / "target", key=key, force=True, unauthenticated=True)
    with pytest.raises(BackupRefused, match=LACKS_KEY):
        await empty.restore(tmp_path / "target", key="", force=True)
    assert (content(servers[1]), files_of(empty.storage)) == ({}, {})
    await empty.restore(tmp_path / "target", key="an-encryption-key-of-32-characters,another-key-that-came-first")
    with pytest.raises(BackupRefused, match="is not set, but stored secrets need it"):
        await service.back_up(tmp_path / "target", encryption_key="")
    written = b"".join(path.read_bytes() for path in (tmp_path / "target" / "backups").iterdir())
    assert b"another-key" not in written


async def test_secrets_that_no_key_opens(service: Service, empty: Service, tmp_path: Path) -> None:
    """Such a backup would name a key that does not open its secrets, and be restored with that one only."""
    (_, _, app), *_ = await service.fill(1)
    sentence = r"^GATEWAY_ENCRYPTION_KEY does not open 3 stored secrets, such as that of \{p\d\d\}:.*environment:.*"
    with pytest.raises(BackupRefused, match=sentence):
        await service.back_up(tmp_path / "target", encryption_key="a-mistyped-key-of-32-characters-x")
    assert not (tmp_path / "target" / "backups").exists()
    both = f"a-new-encryption-key-of-32-chars,{KEY}"
    await service.back_up(tmp_path / "target", encryption_key=both)
    with pytest.raises(BackupRefused, match=LACKS_KEY):
        await empty.restore(tmp_path / "target", key="a-new-encryption-key-of-32-chars")
    await reseal_all(service.store, Vault(both))
    await service.back_up(tmp_path / "target", encryption_key=both)
    await empty.restore(tmp_path / "target", key="a-new-encryption-key-of-32-chars")
    opened = Environments(empty.store, Vault("a-new-encryption-key-of-32-chars"))
    assert await opened.open_variables(app) == {"COLOR": "red 0"}


async def test_what_is_there_is_not_replaced(empty: Service, servers: list[RedisServer], target: Path) -> None:
    await empty.storage.put("sources/app/src_1.tar.gz", b"mine")
    with pytest.raises(BackupRefused, match=r"^the storage is not empty: .*; --force replaces them"):
        await empty.restore(target)
    assert (content(servers[1]), files_of(empty.storage)) == ({}, {"sources/app/src_1.tar.gz": b"mine"})
    await empty.fill(1)
    before = content(servers[1])
    with pytest.raises(BackupRefused, match=r"^Redis is not empty: .*; --force replaces them"):
        await empty.restore(target)
    assert content(servers[1]) == before
    await empty.restore(target, force=True)
    assert lacks(content(servers[0]), content(servers[1])) == LEFT_OUT
    assert not before.keys() & content(servers[1]).keys() - {LAYOUT_KEY} - content(servers[0]).keys()


async def test_a_service_that_runs(empty: Service, target: Path) -> None:
    for key in ("worker:sites:host-1", "{ops}:processes"):
        await empty.store.client.set(key, "1")
        with pytest.raises(BackupRefused, match=r"^gateways or workers run"):
            await empty.restore(target, force=True)
        assert await empty.store.get(LAYOUT_KEY) is None
        await empty.store.client.delete(key)


async def test_a_service_that_starts_during_the_verification(
    empty: Service, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the layout by then, and would not look at it again."""
    verify = BackupTarget.verify

    async def start_and_verify(target: BackupTarget, manifest: BackupManifest) -> int:
        await empty.store.client.mset({LAYOUT_KEY: LAYOUT, PROCESSES_KEY: "1"})
        return await verify(target, manifest)

    monkeypatch.setattr(BackupTarget, "verify", start_and_verify)
    with pytest.raises(BackupRefused, match=r"^gateways or workers run"):
        await empty.restore(target, force=True)
    assert await empty.store.get(LAYOUT_KEY) == str(LAYOUT)
    assert (await empty.store.list_keys(), files_of(empty.storage)) == ({LAYOUT_KEY, PROCESSES_KEY}, {})


async def test_a_restore_that_is_ended_before_it_writes_lets_the_service_start(
    service: Service, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise whoever presses Ctrl-C meanwhile could only restore, and lose what is there."""
    await service.store.client.set(LAYOUT_KEY, LAYOUT)

    async def end_apps(_: Backup) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Backup, "_end_apps", end_apps)
    with pytest.raises(asyncio.CancelledError):
        await service.restore(target, force=True)
    assert await service.store.get(LAYOUT_KEY) == str(LAYOUT)


async def test_damaged_backups(service: Service, empty: Service, servers: list[RedisServer], target: Path) -> None:
    """Whichever file it is, nothing is restored. The next backup replaces what is missing or has another size."""
    for path in [*objects_of(target), *(target / "backups").iterdir()]:
        whole = path.read_bytes()
        for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(BadBackup):
                await empty.restore(target, force=True)
            path.write_bytes(whole)
    assert (content(servers[1]), files_of(empty.storage)) == ({}, {})
    for number, path in enumerate(objects_of(target)):
        path.write_bytes(b"") if number % 2 else path.unlink()
    await service.back_up(target)
    await empty.restore(target)


async def test_a_backup_of_a_newer_version(service: Service, tmp_path: Path) -> None:
    await service.store.client.set(LAYOUT_KEY, LAYOUT + 1)
    with pytest.raises(BackupRefused, match="and this version knows"):
        await service.back_up(tmp_path / "target")


# -- files on the way ----------------------------------------------------------------------------------------


@pytest.fixture
def spool_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders in which files are on the way. There is none for temporary files, which is often in memory."""
    folders, opening = list[Path](), run.open_spool

    def note(parent: Path) -> Any:
        folders.append(parent)
        return opening(parent)

    monkeypatch.setattr(run, "open_spool", note)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    return folders


# -- repeated, interrupted, and at the same time -------------------------------------------------------------


async def test_a_second_backup_copies_what_is_new(
    service: Service, empty: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, _, app), *_ = await service.fill()
    target = tmp_path / "target"
    first = await service.back_up(target)
    before = {path: path.stat().st_mtime_ns for path in objects_of(target)}
    fetched: list[str] = []
    fetch = files.fetch_part

    async def count(storage: Any, key: str, path: Path) -> Any:
        fetched.append(key)
        return await fetch(storage, key, path)

    monkeypatch.setattr(files, "fetch_part", count)
    again = await service.back_up(target)
    assert (again.added, fetched) == (0, [])
    await service.serve(app, "dep_2")
    third = await service.back_up(target)
    assert sorted(name.partition("/")[0] for name in fetched) == ["archives", "logs", "sources"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    await empty.restore(target, first.manifest.at)
    assert await empty.store.client.hget(site_key(app.account, app.id), "live") == "dep_1"
    assert await empty.store.client.exists(deploy_key(app.account, "dep_2")) == 0
    await empty.restore(target, third.manifest.at, force=True)
    assert await empty.store.client.exists(deploy_key(app.account, "dep_2")) == 1


async def test_old_backups_are_removed_without_what_others_need(
    service: Service, empty: Service, tmp_path: Path
) -> None:
    (_, _, app), *_ = await service.fill()
    target = tmp_path / "target"
    await service.back_up(target)
    await service.storage.put("logs/2026-07-02/only-in-the-second.gz", b"unneeded")
    second = await service.back_up(target)
    await service.storage.delete(["logs/2026-07-02/only-in-the-second.gz"])
    kept = [await service.back_up(target)]
    await service.serve(app, "dep_2")
    kept.append(await service.back_up(target, keep=2))
    assert [path.name[:18] for path in sorted((target / "backups").iterdir())] == [
        re.sub(r"[-:.]", "", report.manifest.at)[:18] for report in kept
    ]
    assert not [path for path in objects_of(target) if path.read_bytes() == b"unneeded"]
    for report in kept:
        await empty.restore(target, report.manifest.at, force=True)
    with pytest.raises(BadBackup, match="there is no backup until"):
        await empty.restore(target, second.manifest.at, force=True)
    assert not list((target / "marks").iterdir())


async def test_nothing_is_removed_while_another_backup_runs_or_one_is_damaged(service: Service, target: Path) -> None:
    other = BackupTarget(open_target(str(target)), service.vault)
    began = time.monotonic()
    async with other.marked_as("running"):
        report = await service.back_up(target, keep=1)
    seconds = time.monotonic() - began
    assert report.notes == ["no old backup was removed: another backup runs"]
    async with other.marked_as("pruning"):
        waiting = asyncio.create_task(service.back_up(target))
        await asyncio.sleep(2 * seconds)
        assert not waiting.done(), "it could rely on what is being removed"
    await waiting
    sorted((target / "backups").iterdir())[-1].write_text("damaged")
    report = await service.back_up(target, keep=2)
    assert report.notes[0].startswith("no old backup was removed: the file backups/")
    assert len(list((target / "backups").iterdir())) == 4


@pytest.mark.parametrize("place", ["restore_files", "write_records"])
async def test_a_restore_that_is_interrupted(
    place: str,
    service: Service,
    empty: Service,
    servers: list[RedisServer],
    target: Path,
    forger: Forger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process starts with half of the data, and the same restore goes on where it ended."""
    whole = getattr(run, place)
    first = forger.newest["at"]

    async def fail(*args: Any) -> Any:
        await whole(*args)
        raise BackboneUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(run, place, fail)
        with pytest.raises(BackboneUnavailable):
            await empty.restore(target)
    with pytest.raises(LayoutFault, match="if a restore was interrupted, run it again"):
        await upgrade_redis(empty.store)
    second = (await service.back_up(target)).manifest.at
    with pytest.raises(BackupRefused, match="not empty"):
        await empty.restore(target, second)  # this is another backup
    await empty.restore(target, first)
    await upgrade_redis(empty.store)
    assert files_of(empty.storage) == files_of(service.storage)
    assert lacks(content(servers[0]), content(servers[1])) == LEFT_OUT


async def test_two_backups_at_once_under_load(service: Service, empty: Service, tmp_path: Path) -> None:
    """Apps come and go, money moves and releases change. What is restored belongs together."""
    await service.fill(5)
    target, ended = tmp_path / "target", asyncio.Event()

    async def load() -> None:
        number = 1
        while not ended.is_set():
            made = await service.fill(1)
            for _, _, app in made:
                await service.spend(app, cost=100, reserve=50)
                for deploy in range(2, 6):
                    await service.serve(app, f"dep_{deploy}_{number}")
                if number % 2:
                    await service.registry.delete_app(app)
            number += 1

    loading = asyncio.create_task(load())
    await asyncio.sleep(0.3)
    reports = await asyncio.gather(service.back_up(target), service.back_up(target))
    ended.set()
    await loading
    assert [report.notes for report in reports] == [[], []]
    await empty.restore(target)
    for key in await empty.store.list_keys():
        if kind_of(key) == "serving":
            app = key.split(":")[2]
            assert await empty.storage.list_names(f"archives/{app}/")
        if kind_of(key) == "spend":
            fields = await empty.store.client.hgetall(key)
            assert fields["settled"] in ("50", "100", "150"), fields
            assert not [name for name in fields if name.startswith("reserved")]


async def test_the_target_and_the_storage_are_s3(
    servers: list[RedisServer], spool_folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with S3Server(tmp_path) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        target = f"s3://{BUCKET}/backups/of-this"
        service = Service(servers[0].url, tmp_path / "a", storage_url=f"s3://{BUCKET}/one")
        other = Service(servers[1].url, tmp_path / "b", storage_url=f"s3://{BUCKET}/two")
        await service.fill(1)
        await service.storage.put("data/app/copies/1-a.tar.gz", b"copy")
        made = await service.back_up(target)
        opened = BackupTarget(open_target(target), service.vault)
        assert await opened.verify(made.manifest) > 0
        assert (await service.back_up(target, keep=1)).added == 0
        await other.restore(target)
        assert spool_folders == [service.folder, service.folder, other.folder]
        assert len(await opened.list_backups()) == 1
        assert await other.storage.exists("data/app/copies/1-a.tar.gz")
        assert lacks(content(servers[0]), content(servers[1])) == LEFT_OUT
        plain = Service(servers[2].url, tmp_path / "c")
        with pytest.raises(BackupRefused, match="of a shared storage: set GATEWAY_STORAGE_URL"):
            await plain.restore(target)
        for each in (service, other, plain):
            await each.close()


async def test_the_access_list_of_the_documentation(
    service: Service, servers: list[RedisServer], tmp_path: Path
) -> None:
    """docs/redis.md has it. Commands such as RESTORE and KEYS are not in it."""
    await service.fill()
    for server in servers[:2]:
        with server.client() as client:
            client.execute_command("ACL SETUSER gateway on >secret ~* &* +@all -@dangerous +info")
    urls = [server.url.replace("//", "//gateway:secret@") for server in servers[:2]]
    limited, other = Service(urls[0], tmp_path / "data"), Service(urls[1], tmp_path / "other")
    await limited.back_up(tmp_path / "target")
    await other.restore(tmp_path / "target")
    assert lacks(content(servers[0]), content(servers[1])) == LEFT_OUT
    await limited.close()
    await other.close()
    for server in servers[:2]:
        with server.client() as client:
            client.acl_deluser("gateway")


async def test_redis_cluster(service: Service, servers: list[RedisServer], tmp_path: Path) -> None:
    made = await service.fill(4)
    await service.back_up(tmp_path / "target")
    with redis_servers.cluster() as url:
        on_cluster = Service(url, tmp_path / "there")
        await on_cluster.restore(tmp_path / "target")
        again = await on_cluster.back_up(tmp_path / "again")
        assert (again.manifest.accounts, again.manifest.apps) == (4, 4)
        for account, _, app in made:
            assert [each.id for each in await on_cluster.registry.list_apps(account)] == [app.id]
        await on_cluster.close()
    back = Service(servers[1].url, tmp_path / "back")
    await back.restore(tmp_path / "again")
    assert lacks(content(servers[0]), content(servers[1])) == LEFT_OUT
    await back.close()


ROOT = Path(__file__).parents[3]
# Each POST adds its body to a file in DATA_DIR, and a GET returns the file.
NOTES = """\
const fs = require('fs'), http = require('http')
const file = process.env.DATA_DIR + '/notes'
http.createServer((request, answer) => {
  if (request.method !== 'POST') return answer.end(fs.existsSync(file) ? fs.readFileSync(file, 'utf8') : '')
  request.on('data', (chunk) => fs.appendFileSync(file, chunk)).on('end', () => answer.end('kept'))
}).listen(process.env.PORT)
"""


async def capsule(gw: Gateway, *arguments: str, code: int = 0) -> str:
    """Runs a command on the machine of the service. Returns what it prints."""
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "capsule_gateway", *arguments],
        env=gw.environment | {"PYTHONPATH": str(ROOT)},
        cwd=gw.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == code, run.stderr
    assert not gw.find_secrets((run.stdout + run.stderr).encode())
    return run.stdout + run.stderr


async def restore_in_place(gw: Gateway, server: RedisServer, folder: Path, app: str, target: str) -> None:
    """An app outlives its worker, and has written since the backup. What it wrote later would be lost."""
    with server.client() as client:
        beats = [PROCESSES_KEY, *(key.decode() for key in client.scan_iter(worker_key("*", "*")))]
        await wait_until(lambda: not client.exists(*beats), 30)
    data = AppData(folder, app)
    refused = await capsule(gw, "restore", target, code=1)
    assert f"1 apps of this data folder run and would change their former data, such as {app}; --force" in refused
    assert (data.is_running, (data.files / "notes").read_text()) == (True, "one lost")
    await capsule(gw, "restore", target, "--force")
    assert (data.is_running, (data.files / "notes").read_text()) == (False, "one ")


async def test_apps_data_hooks_and_money_are_back(tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    async with contextlib.AsyncExitStack() as stack:
        for name in ("redis-1", "redis-2"):
            (tmp_path / name).mkdir()
        first, second = [stack.enter_context(RedisServer(folder=tmp_path / f"redis-{number}")) for number in (1, 2)]
        data, other = [stack.enter_context(passable_folder()) for _ in range(2)]
        provider = await stack.enter_async_context(FakeProvider())
        backend = await stack.enter_async_context(FakeAppBackend("ES256"))
        receiver = await stack.enter_async_context(FakeReceiver())
        gw, restored = [
            Gateway(server.url, provider, tmp_path, GATEWAY_DATA_DIR=str(folder), GATEWAY_CANARY="0.2")
            for server, folder in ((first, data), (second, other))
        ]
        for each in (gw, restored):
            stack.push_async_callback(each.http.aclose)
            stack.callback(each.kill)
        await gw.start()
        async with host_on(gw, receiver, free_port()) as host:
            await host.worker("deploys", "webhooks")
            page = await host.app()
            hook = await host.hook(page)
            await host.over(await host.publish(page, {"index.html": "first"}))
            await host.over(await host.publish(page, {"index.html": "second"}))
            notes = await host.app(build={"start": "exec node server.js"})
            assert (await host.over(await host.publish(notes, {"server.js": NOTES})))["state"] == "live"
            headers = {"Host": f"{notes}.apps.localhost"}
            assert (await host.web.post("/", content="one ", headers=headers)).text == "kept"
            inference = await host.account.app(backend)
            assert (await inference.ask("hello")).status_code == 200
            spent = await host.account.settled()
            await wait_until(
                lambda: host.call("GET", f"/account/apps/{notes}/data"), holds=lambda found: found["usedBytes"]
            )

            async def load() -> None:
                while True:
                    await inference.ask("hello")

            async with in_background(load()):
                printed = await capsule(gw, "backup", target)
            assert "Note" not in printed, printed
            assert (await host.web.post("/", content="lost", headers=headers)).text == "kept"
        await gw.stop()
        await restore_in_place(gw, first, data, notes, target)
        first.kill()
        shutil.rmtree(data / "releases")

        await capsule(restored, "restore", target)
        second.kill()
        second.start()
        await restored.start()
        host.account.gateway = restored
        back = Host(restored, host.account, receiver, free_port())
        stack.push_async_callback(back.web.aclose)
        worker = await (await back.worker("deploys", "webhooks")).serving()
        stack.push_async_callback(worker.stop)
        await wait_until(lambda: back.page(page), 60, holds=lambda text: text == "second")
        await wait_until(lambda: back.page(notes), 60, holds=lambda text: text == "one ")
        assert await host.account.settled() >= spent
        received = len(receiver.exchanges)
        assert (await back.over(await back.trigger(hook)))["state"] == "live"
        await wait_until(lambda: len(receiver.exchanges) > received, 30)
        deploys = await back.call("GET", f"/account/deploys?app={page}")
        rolled = await back.call("POST", f"/account/apps/{page}/rollback", json={"deployId": deploys[-1]["id"]})
        assert (await back.over(rolled["deployId"]))["state"] == "live"
        assert await back.page(page) == "first"
