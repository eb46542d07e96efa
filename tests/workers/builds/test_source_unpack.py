import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandbox import Room
from workers.builds import source
from workers.builds.source import DeployError
from workers.sandbox.sandbox import MIB, SandboxLimits

FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def member(
    name: str, kind: bytes = FILE, link: str = "", data: bytes = b"", **more: Any
) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(data)
    for field, value in more.items():
        setattr(made, field, value)
    return made, data


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for made, data in members:
            tar.addfile(made, io.BytesIO(data))
    return archive.getvalue()


async def unpack(room: Room, archive: bytes, **limits: Any) -> Path:
    path = room.top / "stored.tar.gz"
    path.touch(mode=0o600)
    path.write_bytes(archive)
    await source.unpack(room.sandbox, room.uid, room.build, path, room.lines.append, **limits)
    return room.build / "source"


async def test_an_archive_comes_out_as_it_went_in(each_room: Room) -> None:
    long = "/".join(["long" * 20] * 3)
    found = await unpack(
        each_room,
        packed(
            member("./", FOLDER, mode=0o700),
            member("./a/b/page", data=b"text", mode=0o000, uid=0),
            member("run", data=b"#!/bin/sh\n", mode=0o4755),
            member("a/up", LINK, "../run"),
            member("a/down", LINK, "b/page"),
            member("nowhere", LINK, "not/there"),
            member("same", HARD, "a/b/page"),
            member(long, data=b"long"),
            member("late", data=b"", mtime=2**40),
            member("früh\n", data=b"", mtime=-1),
            member("a", FOLDER, mode=0o000),
        ),
    )
    assert (found / "a/b/page").read_text() == (found / "same").read_text() == (found / "a/down").read_text() == "text"
    assert os.readlink(found / "a/up") == "../run"
    assert os.readlink(found / "nowhere") == "not/there"
    assert (found / long).exists()
    assert (found / "früh\n").exists()
    assert oct((found / "run").stat().st_mode) == "0o100755"
    assert oct((found / "a/b/page").stat().st_mode) == "0o100644"
    assert (found / "run").stat().st_uid == (os.getuid() if each_room.uid is None else each_room.uid)


GOOD = packed(member("page", data=b"x" * 100), member("last", data=b"x"))


async def test_a_refused_and_a_damaged_archive_are_reported(room: Room) -> None:
    """tests/gateway/deploys/test_archives.py has all faults."""
    for archive, reason in (
        (packed(member("a", LINK, "../x")), r"^the archive contains the link 'a', which leaves its folder$"),
        (GOOD[:-1], "^the archive can't be unpacked"),
    ):
        with pytest.raises(DeployError, match=reason):
            await unpack(room, archive)
        (room.build / "source").rename(room.build / reason[:5])


async def test_too_many_files_and_bytes_are_refused(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "ARCHIVE_FILES", 10)
    monkeypatch.setattr(source, "ARCHIVE_BYTES", 3 * MIB)
    with pytest.raises(DeployError, match="more than 10 files"):
        await unpack(room, packed(*(member(f"{n}") for n in range(11))))
    (room.build / "source").rename(room.build / "before")
    with pytest.raises(DeployError, match="more than 3 MiB"):
        await unpack(room, packed(*(member(f"{n}", data=b"\0" * MIB) for n in range(4))))
    assert sum(path.stat().st_size for path in (room.build / "source").iterdir()) <= 3 * MIB


async def test_bombs_after_the_archive_and_in_a_header_end_at_a_limit(room: Room) -> None:
    zeros = gzip.compress(b"\0" * 10 * MIB) * 1_000
    with pytest.raises(DeployError, match="took longer than 1 seconds"):
        await unpack(room, GOOD + zeros, limits=SandboxLimits(seconds=1))
    (room.build / "source").rename(room.build / "before")
    header = member("x", data=b"", pax_headers={"comment": "x" * 80 * MIB})
    with pytest.raises(DeployError, match=r"ran out of memory; its limit is 50 MiB|can't be unpacked"):
        await unpack(room, packed(header), limits=SandboxLimits(seconds=20, memory=50 * MIB))


async def test_a_removed_source_is_reported(room: Room) -> None:
    with pytest.raises(DeployError, match="publish it again"):
        await source.unpack(room.sandbox, room.uid, room.build, room.top / "gone", room.lines.append)


async def test_a_single_folder_that_is_served_stays(room: Room) -> None:
    found = await unpack(room, packed(member("dist/a")), output="dist")
    assert [str(path.relative_to(found)) for path in sorted(found.rglob("*"))] == ["dist", "dist/a"]
