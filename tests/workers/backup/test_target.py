"""Backups that somebody else has made or changed, who can write to the target."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard

from gateway.accounts.vault import Vault
from tests.support.redis_servers import RedisServer
from tests.workers.backup.conftest import KEY, Forger, Service, files_of, objects_of
from workers.backup.run import BackupRefused
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


async def test_the_authenticator_is_of_no_use_elsewhere(forger: Forger) -> None:
    """Neither as a fingerprint, nor as a signature of something else."""
    newest = forger.newest
    made = bytes.fromhex(newest["authenticator"])
    text = forger.newest_file.read_bytes()
    body = text.replace(b',"authenticator":"' + made.hex().encode() + b'"', b"")
    assert Vault(KEY).is_signed("backup", body, made)
    assert not Vault(KEY).is_signed("", body, made)
    assert not Vault(KEY).is_signed("trial", body, made)
    assert made.hex()[:32] not in newest["keys"]


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


async def test_marks_that_no_backup_has_made(service: Service, tmp_path: Path) -> None:
    await service.fill(1)
    (tmp_path / "target" / "marks").mkdir(parents=True)
    for mark in ("running", "running-", "pruning-x-y", "running-1-x", "pruning-9-\n", "-", "running-²-"):
        (tmp_path / "target" / "marks" / mark).touch()
    (tmp_path / "target" / "marks" / f"pruning-{10**14}-0123456789abcdef").touch()
    assert (await service.back_up(tmp_path / "target", keep=1)).notes == []


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
