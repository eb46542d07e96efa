"""Backups that somebody else has made or changed, who can write to the target, and the names in them."""

import asyncio
import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard

from gateway.keys import BACKED_UP, LEFT_OUT, PARTITION_TAGS
from tests.support.redis_servers import RedisServer
from tests.workers.backup.conftest import Forger, Service, files_of, objects_of
from workers.backup.names import find_record_fault, is_file
from workers.backup.run import BackupRefused
from workers.backup.scripts import KeyCopy
from workers.backup.spool import PARALLEL, SPOOL_BYTES, Spool, SpoolFailed, open_spool
from workers.backup.target import LARGEST_LINES, MANIFEST_BYTES, BackupTarget, BadBackup, open_target


async def test_a_newer_backup_of_somebody_else(service: Service, empty: Service, tmp_path: Path) -> None:
    """It is refused, with or without an authenticator of another key; and the service's own is there with --at."""
    (account, *_), *_ = await service.fill(1)
    own = (await service.back_up(tmp_path / "target")).manifest.at
    forger = Forger(tmp_path / "target")
    genuine = forger.newest
    for changed in (genuine, {name: value for name, value in genuine.items() if name != "authenticator"}):
        forger.write(changed | {"at": "2999-01-01T00:00:00.000Z", "accounts": 7})
        with pytest.raises(BadBackup, match=r"none of the keys|has no authenticator.*add --unauthenticated"):
            await empty.restore(tmp_path / "target")
        assert await empty.store.list_keys() == set()
        forger.remove_newest()
    forger.write({**changed, "at": "2999-01-01T00:00:00.000Z"})
    await empty.restore(tmp_path / "target", own)
    assert await empty.registry.account(account) is not None
    await empty.restore(tmp_path / "target", unauthenticated=True, force=True)


async def test_a_backup_that_was_changed(empty: Service, forger: Forger, target: Path) -> None:
    """Whichever of its fields it is."""
    genuine = forger.newest
    forger.remove_newest()
    for name in genuine.keys() - {"at", "format", "authenticator"}:
        value = genuine[name]
        match value:
            case bool():
                other: Any = not value
            case int():
                other = value + 1
            case _:
                other = [] if value else ["another"]
        forger.write(genuine | {name: other})
        with pytest.raises(BadBackup, match="was made with none of the keys in GATEWAY_ENCRYPTION_KEY, or was changed"):
            await empty.restore(target)
        forger.remove_newest()


async def test_an_old_backup_under_a_newer_name(service: Service, empty: Service, forger: Forger, target: Path) -> None:
    """Keys that were revoked since would be valid again."""
    old = forger.newest_file
    await service.back_up(target)
    (old.parent / f"29990101T000000000Z{old.name[19:]}").write_bytes(old.read_bytes())
    with pytest.raises(BadBackup, match="and was renamed; remove it"):
        await empty.restore(target)


async def test_each_backup_is_listed(service: Service, forger: Forger, target: Path) -> None:
    """Also one that lacks an object, or has a file of another name or size."""
    opened = BackupTarget(open_target(str(target)), service.vault)
    [row] = await opened.describe_all()
    assert (row.state, row.accounts, row.apps, row.notes, row.detail) == ("complete", 1, 1, 0, "")
    for path in objects_of(target):
        whole = path.read_bytes()
        for damage in (partial(path.write_bytes, whole[:-1]), path.unlink):
            damage()
            [row] = await opened.describe_all()
            assert (row.state, row.detail.partition(" of the backup is")[0]) == ("damaged", f"the object {path.name}")
        path.write_bytes(whole)
    newest = forger.newest_file
    newest.with_name(newest.name.replace(".json", "")).write_bytes(newest.read_bytes())
    newest.write_bytes(b" " * (MANIFEST_BYTES + 1))
    assert [row.state for row in await opened.describe_all()] == ["damaged", "damaged"]


async def test_a_service_without_a_key(service: Service, empty: Service, tmp_path: Path) -> None:
    """Its backups have no authenticator. A service that has got a key since takes them when it is told to."""
    await service.store.client.set("former-name:x", "acc_1")
    await service.back_up(tmp_path / "target", encryption_key="")
    assert "authenticator" not in Forger(tmp_path / "target").newest
    with pytest.raises(BadBackup, match=r"has no authenticator: .* add --unauthenticated"):
        await empty.restore(tmp_path / "target")
    await empty.restore(tmp_path / "target", unauthenticated=True)
    await empty.restore(tmp_path / "target", key="", force=True)
    await service.back_up(tmp_path / "target")
    with pytest.raises(BackupRefused, match="lacks a key that the backup needs"):
        await empty.restore(tmp_path / "target", key="", force=True)


async def test_a_backup_takes_nothing_from_a_forged_one(service: Service, empty: Service, tmp_path: Path) -> None:
    """A forged list says that a file is unchanged, and has other content for it. It would be signed by the next one."""
    (_, _, app), *_ = await service.fill(1)
    await service.back_up(tmp_path / "target")
    forger, key = Forger(tmp_path / "target"), f"archives/{app.id}/dep_1.tar.gz"
    listed = {entry[0]: entry for entry in forger.read_lines(forger.newest["files"])}
    forged = forger.add(bytes(listed[key][1][1]))
    manifest = forger.newest | {"at": "2999-01-01T00:00:00.000Z"}
    manifest["files"] = [forger.add_lines(*(listed | {key: [key, forged, listed[key][2]]}).values())]
    forger.write(manifest)
    own = (await service.back_up(tmp_path / "target")).manifest.at
    await empty.restore(tmp_path / "target", own)
    assert files_of(empty.storage) == files_of(service.storage)


async def test_a_forged_backup_pushes_none_out(service: Service, forger: Forger, target: Path) -> None:
    forger.forge()
    report = await service.back_up(target, keep=1)
    assert report.notes[0].startswith("no old backup was removed: the backup of 2999-01-01T00:00:00.000Z was made with")
    assert len([*(target / "backups").iterdir()]) == 3


DEEP = "[" * 100_000 + "]" * 100_000


FORGED_FIELDS: list[dict[str, Any]] = [
    {"files": [["0" * 63 + "/", 1]]},
    {"files": [["0" * 64 + "\n", 1]]},
    {"files": [["0" * 64, -1]]},
    {"files": [["0" * 64, 10**30]]},
    {"records": [[]]},
    {"layout": 0},
    {"at": "yesterday"},
    {"format": 10**400},
    {"format": 2},
]
TEXTS = [b"", b"null", b"\xff", b'{"format":1}', b'{"format":1,"x":' + DEEP.encode() + b"}"]


async def test_forged_fields(empty: Service, servers: list[RedisServer], forger: Forger, target: Path) -> None:
    for manifest in (*(forger.newest | fields for fields in FORGED_FIELDS), *TEXTS):
        forger.write(manifest, stamp="29990101T000000000Z")
        with pytest.raises(BadBackup):
            await empty.restore(target, unauthenticated=True)
        forger.remove_newest()
    with servers[1].client() as client:
        assert client.keys() == []


@pytest.mark.parametrize("part", ["files", "records"])
async def test_lists_that_are_none(part: str, empty: Service, forger: Forger, target: Path) -> None:
    pack = zstandard.ZstdCompressor().compress
    huge = pack(b"x" * 100)
    parameters = zstandard.get_frame_parameters(huge)
    assert parameters.content_size == 100
    claims = bytes([*huge[:4], 0xE0, *(LARGEST_LINES + 1).to_bytes(8, "little"), *huge[6:]])
    assert zstandard.frame_content_size(claims) == LARGEST_LINES + 1
    for content in (b"", b"not packed", pack(b"{"), pack(b"[1]"), pack(b"\xff"), pack(DEEP.encode()), claims):
        forger.write(forger.newest | {"at": "2999-01-01T00:00:00.000Z", part: [forger.add(content)]})
        with pytest.raises(BadBackup):
            await empty.restore(target, unauthenticated=True)
        forger.remove_newest()


async def test_an_object_that_grows_without_end(service: Service, tmp_path: Path) -> None:
    await service.fill(1)
    report = await service.back_up(tmp_path / "target")
    (part, *_) = report.manifest.records
    path = tmp_path / "target" / "objects" / part.digest[:2] / part.digest
    with path.open("ab") as file:
        file.truncate(1 << 34)
    target = BackupTarget(open_target(str(tmp_path / "target")), service.vault)
    with pytest.raises(BadBackup, match="is damaged"):
        await target.fetch(part, tmp_path / "fetched")
    assert (tmp_path / "fetched").stat().st_size < 1 << 22


# -- names: nothing is written outside, and nothing at all -------------------------------------------------------


GOOD = (
    "sources/app/src_1.tar.gz",
    "archives/app/dep_1.tar.gz",
    "logs/2026-07-02/dep_1.gz",
    "data/app/snapshots/snp_1.tar.gz",
    "certificates/caddy/certificates/acme-v02.api.letsencrypt.org-directory/wildcard_.example.com/a.key",
)
BAD = (
    *("../outside", "sources/../../outside", "sources/..", "/outside", "//outside", "certificates//outside"),
    *("certificates/../outside", "certificates/sources/one", "certificates/caddy/../../outside", "data/../outside"),
    *("data/app/files/database", "data/app/account", "data/app/snapshots/../files/x", "data/app/snapshots/a/b"),
    *("layout", "releases/app/live/dep_1/app/x", "running/dep_1", "uploads/x", ".ssh/authorized_keys", "sources"),
    *("sources/", "sources//x", "sources/.", "sources/a\\..\\b", "sources/a\0", "sources/a\n", "sources/\ud800", ""),
    *("caddy/certificates/x", "certificates/caddy/x.sock", "certificates/caddy/.lock", "logs/" + "x" * 256),
)


def test_which_files_a_backup_has() -> None:
    assert [name for name in GOOD if not is_file(name)] == []
    assert [name for name in BAD if is_file(name)] == []


async def test_a_forged_file(
    empty: Service, servers: list[RedisServer], forger: Forger, target: Path, tmp_path: Path
) -> None:
    """The operator takes a backup that proves nothing."""
    for name in BAD:
        if name.startswith(("/", "certificates//")):
            name = name.replace("/outside", f"{tmp_path}/outside", 1)
        forger.forge(files=[[name, forger.add(b"forged"), "1"]])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BadBackup, match=r"names a file outside|is damaged"):
            await empty.restore(target, unauthenticated=True)
        assert sorted(tmp_path.rglob("*")) == before
        forger.remove_newest()
    assert files_of(empty.storage) == {}
    with servers[1].client() as client:
        assert client.keys() == []


def record(key: str, kind: str, *values: Any) -> list[Any]:
    return [key, kind, -1, [value if isinstance(value, str) else json.dumps(value) for value in values]]


TAG = PARTITION_TAGS[0]
SERVED = {"account": "acc_1", "app": "app", "address": "live", "step": "live", "deploy": "dep_1"}
SNAPSHOT = {"id": "../x", "at": "2026-07-02T10:00:00.000Z", "bytes": 1, "reason": "daily"}
DELETED = {"app": "app", "appId": "app", "deletedAt": "2026-07-02T10:00:00.000Z", "snapshots": []}
BAD_RECORDS = [
    record(f"{TAG}:data:acc_1:../../x", "string", "{}"),
    record("app:a\\x", "string", "{}"),
    record("app:x", "string", {"id": "/etc/cron.d", "name": "x"}),
    record(f"{TAG}:site:app", "hash", "live", "../../../x"),
    record(f"{TAG}:deploy:dep_1", "hash", "id", "dep_1", "appId", "../x"),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"app": "../x"}),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"address": "../x"}),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"served": "/x"}),
    record(f"{TAG}:serving:app", "hash", "live", SERVED | {"releases": {"../x": {"digest": "d", "size": 1}}}),
    record(f"{TAG}:data-snapshots:acc_1:app", "hash", "snp_1", SNAPSHOT),
    record(f"{TAG}:data-deleted:acc_1", "hash", "del_1", DELETED | {"appId": ".."}),
    record(f"{TAG}:data-deleted:acc_1", "hash", "del_1", DELETED | {"snapshots": [SNAPSHOT]}),
    # The names of fields are ids too.
    record(f"{TAG}:site:app", "hash", "preview:../x", "dep_1"),
    record(f"{TAG}:serving:app", "hash", "../x", SERVED),
    record(f"{TAG}:data-snapshots:acc_1:app", "hash", "../x", SNAPSHOT | {"id": "snp_1"}),
    record(f"{TAG}:data-snapshots:acc_1:app", "hash", "../x", "broken"),
    record(f"{TAG}:data-deleted:acc_1", "hash", "../x", DELETED),
    # A broken value does not hide the next one.
    record(f"{TAG}:serving:app", "hash", "live", '{"app":' + "[" * 50_000, "preview", SERVED | {"served": "/x"}),
    record(f"{TAG}:data-deleted:acc_1", "hash", "del_0", "broken", "del_1", DELETED | {"appId": ".."}),
]


BROKEN_RECORDS = [
    record("app:x", "string", "{}", "{}"),
    record("app:x", "stream", "{}"),
    record(f"{TAG}:site:app", "hash", "live"),
    record(f"{TAG}:probes", "zset", "app", "nan"),
    record(f"{TAG}:probes", "zset", "app", "1e99999"),
    ["app:x", "string", 2**62, ["{}"]],
    ["app:x", "string", -2, ["{}"]],
]


async def test_a_forged_record(empty: Service, servers: list[RedisServer], forger: Forger, target: Path) -> None:
    """Its ids become the names of folders on the hosts, and what Redis does not take ends a restore in the middle."""
    for bad, words in [
        *((each, "has a record with a path for a name") for each in BAD_RECORDS),
        *((each, "has a record that Redis does not take") for each in BROKEN_RECORDS),
    ]:
        forger.forge(records=[bad])
        with pytest.raises(BadBackup, match=words):
            await empty.restore(target, unauthenticated=True)
        forger.remove_newest()
    with servers[1].client() as client:
        assert client.keys() == []


def test_records_that_a_backup_has() -> None:
    """A branch may contain a slash, and a broken record leads nowhere."""
    good = [
        record(f"{TAG}:deploy:dep_1", "hash", "id", "dep_1", "branch", "feature/../x", "restores", "data/app/copies/s"),
        record(f"{TAG}:serving:app", "hash", "live", "broken", "preview", SERVED),
        record(f"{TAG}:site:app", "hash", "live", "dep_1", "queued:live", "dep_2", "preview:feature-x", "dep_3"),
        record(f"{TAG}:data-snapshots:acc_1:app", "hash", "snp_1", SNAPSHOT | {"id": "snp_1"}),
        record(f"{TAG}:data-deleted:acc_1", "hash", "del_1", DELETED),
        record("app:x", "string", '{"id":' + "[" * 50_000),
        record(f"{TAG}:probes", "zset", "app", "1.7832e+18", "other", "-inf"),
        record(f"{TAG}:members:acc_1", "string", {"a/b@example.com": 1}),
    ]
    assert [find_record_fault(KeyCopy(*each)) for each in good] == [""] * len(good)


async def test_records_of_a_kind_that_no_backup_has(
    service: Service, empty: Service, forger: Forger, target: Path
) -> None:
    """They are left out: a session would open an account, and other keys in the same Redis are not the service's."""
    forged = [record(f"{kind}:x", "string", "forged") for kind in (*sorted(LEFT_OUT), "another", "{tag}")]
    forger.forge(records=forged)
    await empty.store.client.set("another:x", "of another program")
    await empty.restore(forger.target, unauthenticated=True)
    assert await empty.store.get("another:x") == "of another program"
    present = {key.partition(":")[0] for key in await empty.store.list_keys() if key.endswith(":x")}
    assert present == {"another"}
    assert "app" in BACKED_UP


# -- files on the way ------------------------------------------------------------------------------------------


async def follow(spool: Spool, sizes: list[int]) -> list[list[int]]:
    """Returns the sizes of the files that were there together, after each of them began."""
    present, found = list[int](), list[list[int]]()

    async def use(size: int) -> None:
        async with spool.file(size) as path:
            path.touch()
            present.append(size)
            found.append(sorted(present))
            await asyncio.sleep(0)
            present.remove(size)

    async with asyncio.TaskGroup() as group:
        for size in sizes:
            group.create_task(use(size))
    return found


async def test_the_space_is_bounded(tmp_path: Path) -> None:
    third, larger = SPOOL_BYTES // 3, SPOOL_BYTES + 1
    with open_spool(tmp_path) as spool:
        many = await follow(spool, [1] * 50)
        large = await follow(spool, [third] * 10 + [larger] + [third] * 10 + [larger, 1])
    assert (len(many), max(map(len, many))) == (50, PARALLEL)
    assert (len(large), max(map(len, large))) == (23, 3)
    assert all(sum(sizes) <= SPOOL_BYTES or sizes == [larger] for sizes in large)
    assert not [*tmp_path.iterdir()]


async def fail(spool: Spool) -> None:
    async with spool.file(SPOOL_BYTES) as path:
        path.write_bytes(b"part of it")
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_copy_that_fails_leaves_its_room(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        for _ in range(2 * PARALLEL):
            with pytest.raises(SpoolFailed, match=r"^/.*: No space left on device; make room there, "):
                await fail(spool)
        assert [path.name for path in tmp_path.glob("spool-*/*")] == ["lock"]
