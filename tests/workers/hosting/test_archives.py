"""Archives of releases, packed and unpacked by real processes."""

import hashlib
import io
import os
import shlex
import sys
import tarfile
from pathlib import Path

import pytest

from gateway.accounts.records import App
from gateway.deploys.release import ReleaseArchive
from gateway.settings import Settings
from tests.support.hosted_apps import Hosting
from tests.support.programs import on_small_disk
from workers.engine.driver import ReleaseMissing
from workers.hosting.archive_files import BadArchive
from workers.hosting.archives import pack, read_record, unpack, write_record
from workers.hosting.driver import HostDriver


@pytest.fixture
def release(tmp_path: Path) -> Path:
    release = tmp_path / "release"
    (release / "app" / "bin").mkdir(parents=True)
    (release / "app" / "bin" / "run").write_text("#!/bin/sh\n")
    (release / "app" / "bin" / "run").chmod(0o755)
    os.link(release / "app" / "bin" / "run", release / "app" / "same")
    (release / "app" / "é").symlink_to("/usr/bin/node")
    (release / "start").write_text("exec ./bin/run")
    (release / "environment").write_text("sealed")
    (release / "size").write_text("12")
    return release


async def test_a_release_is_unpacked_without_the_files_of_its_host(release: Path, tmp_path: Path) -> None:
    archive = await pack(release, tmp_path / "archive")
    (tmp_path / "out").mkdir()
    await unpack(tmp_path / "archive", archive, tmp_path / "out")
    found = sorted(os.fspath(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert found == ["app", "app/bin", "app/bin/run", "app/same", "app/é", "start"]
    assert os.access(tmp_path / "out" / "app" / "bin" / "run", os.X_OK)
    assert os.readlink(tmp_path / "out" / "app" / "é") == "/usr/bin/node"
    assert archive.size == (tmp_path / "archive").stat().st_size
    write_record(release, archive)
    assert read_record(release) == archive
    assert read_record(tmp_path) is None


async def test_a_damaged_archive_is_not_unpacked(release: Path, tmp_path: Path) -> None:
    archive = await pack(release, tmp_path / "archive")
    packed = (tmp_path / "archive").read_bytes()
    (tmp_path / "archive").write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    (tmp_path / "out").mkdir()
    with pytest.raises(BadArchive, match="damaged"):
        await unpack(tmp_path / "archive", archive, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "members",
    [
        [("../out-of-it", None, tarfile.REGTYPE)],
        [("/tmp/out-of-it", None, tarfile.REGTYPE)],
        [("link", "..", tarfile.SYMTYPE), ("link/out-of-it", None, tarfile.REGTYPE)],
        [("hard", "../precious", tarfile.LNKTYPE)],
        [("device", None, tarfile.FIFOTYPE)],
        [("files/leak", "/etc/passwd", tarfile.SYMTYPE)],
    ],
    ids=["dots", "absolute", "through-a-link", "hard-link", "device", "link-in-files"],
)
async def test_a_dangerous_archive_is_refused(tmp_path: Path, members: list[tuple[str, str | None, bytes]]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, target, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target or ""
            tar.addfile(member)
    (tmp_path / "archive").write_bytes(packed.getvalue())
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    right = ReleaseArchive(hashlib.sha256(packed.getvalue()).hexdigest(), len(packed.getvalue()))
    with pytest.raises(BadArchive):
        await unpack(tmp_path / "archive", right, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out", "precious"]
    assert (tmp_path / "precious").stat().st_nlink == 1


async def test_a_full_disk_is_not_the_fault_of_an_archive(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (release / "app" / "big").write_bytes(os.urandom(2 << 20))
    archive = await pack(release, tmp_path / "archive")
    (disk := tmp_path / "disk").mkdir()
    small = tmp_path / "python"  # the processes find a small disk at the folder
    small.write_text(f'#!/bin/sh\nexec {shlex.join([*on_small_disk(disk), sys.executable])} "$@"\n')
    small.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(small))
    with pytest.raises(OSError, match="No space left on device"):
        await pack(release, disk / "archive")
    with pytest.raises(OSError, match="No space left on device"):
        await unpack(tmp_path / "archive", archive, disk)


async def test_a_release_from_another_archive_is_not_placed(hosting: Hosting) -> None:
    """It is fetched again, here from a storage without it."""
    release, deploy = hosting.publish("dep_1", {"index.html": "page"}).release("dep_1"), hosting.deploy("dep_1")
    target = hosting.target(deploy, App(id="shop", name="shop", account="acc_1", createdAt=""))
    driver = HostDriver(Settings(data_dir=str(hosting.folder), apps_domain="apps.test"))
    await driver.place(target)
    write_record(release, ReleaseArchive("another", 1))
    with pytest.raises(ReleaseMissing):
        await driver.place(target)
