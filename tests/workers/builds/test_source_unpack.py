import gzip
import io
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandbox import Room
from workers.builds import source
from workers.builds.source import DeployError
from workers.sandbox.sandbox import MIB, SandboxLimits

FILE, FOLDER, LINK, HARD, DEVICE, FIFO = (
    *(tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE),
    *(tarfile.CHRTYPE, tarfile.FIFOTYPE),
)


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


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([member("/etc/x")], "leaves its folder"),
        ([member("a/../../x")], "leaves its folder"),
        ([member("..", FOLDER)], "leaves its folder"),
        ([member("a", LINK, "/etc/passwd")], "leaves its folder"),
        ([member("a", LINK, "../x")], "leaves its folder"),
        ([member("a/b", LINK, "../../x")], "leaves its folder"),
        ([member("l", LINK, "."), member("a/b", LINK, "../l/../../x")], "leaves its folder"),
        ([member(".", LINK, "..")], "leaves its folder"),
        ([member("l", LINK, "a"), member("l/x")], "through a link"),
        ([member("l", LINK, "a"), member("l")], "through a link"),
        ([member("l", LINK, "a"), member("l", HARD, "l")], "through a link"),
        ([member("a", HARD, "/etc/passwd")], "no earlier file"),
        ([member("a", HARD, "../../key")], "no earlier file"),
        # A hard link to a link would change the folder from which its `..` goes up.
        ([member("d/x"), member("d/x", LINK, "../t"), member("y", HARD, "d/x"), member("y/z")], "no earlier file"),
        ([member("d", DEVICE)], "not a file, a folder or a link"),
        ([member("d", FIFO)], "not a file, a folder or a link"),
        ([member("a"), member("a/b")], "both a file and a folder"),
        ([member("x" * 300)], "a name that is too long"),
    ],
)
async def test_members_that_leave_the_folder_are_refused(room: Room, members: Any, reason: str) -> None:
    with pytest.raises(DeployError, match=reason):
        await unpack(room, packed(*members))
    assert {path.name for path in room.top.iterdir()} - {"tools"} == {"builds", "stored.tar.gz"}
    assert sorted(path.name for path in room.build.iterdir()) == ["source", "work"]


GOOD = packed(member("page", data=random.Random(1).randbytes(100_000)), member("last", data=b"x"))


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (b"", "can't be unpacked"),
        (b"PK\3\4nonsense", "can't be unpacked"),
        (gzip.compress(b"nonsense" * 1_000), "can't be unpacked"),
        (GOOD[:50_000], "can't be unpacked"),
        (GOOD[:-1], "can't be unpacked"),
        (GOOD[:-8] + b"\0" * 8, "can't be unpacked"),
        (gzip.compress(gzip.decompress(GOOD)[:50_000]), "can't be unpacked"),
    ],
    ids=["nothing", "another format", "no tar", "half", "a byte short", "another checksum", "half inside"],
)
async def test_a_damaged_archive_is_refused(room: Room, archive: bytes, reason: str) -> None:
    with pytest.raises(DeployError, match=reason):
        await unpack(room, archive)


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


ADDED = [  # by macOS and Windows
    member("__MACOSX/site/._index.html", data=b"x"),
    member(".DS_Store", data=b"x"),
    member("site/.DS_Store", data=b"x"),
    member("site/._index.html", data=b"x"),
    member("site/Thumbs.db", data=b"x"),
]


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ([member("site/index.html"), member("site/a/b"), *ADDED], ["a", "a/b", "index.html"]),
        ([member("./site/site/x"), member("./site/.hidden")], [".hidden", "site", "site/x"]),
        ([member("site/x"), member("capsule.toml"), *ADDED], ["capsule.toml", "site", "site/x"]),
        ([member("site/x"), member("other", FOLDER)], ["other", "site", "site/x"]),
        ([member("site", FOLDER), member("link", LINK, "site")], ["link", "site"]),
        ([member("a/b/c")], ["b", "b/c"]),
        ([member("index.html")], ["index.html"]),
        ([member("site", FOLDER)], []),
        (ADDED, []),
    ],
)
async def test_what_systems_add_is_dropped_and_a_single_folder_is_the_source(
    room: Room, members: list[tuple[tarfile.TarInfo, bytes]], names: list[str]
) -> None:
    found = await unpack(room, packed(*members))
    assert sorted(str(path.relative_to(found)) for path in found.rglob("*")) == names


@pytest.mark.parametrize(
    ("output", "paths", "names"),
    [
        ("dist", ["dist/a/b"], ["dist", "dist/a", "dist/a/b"]),
        ("dist/browser", ["dist/browser/a"], ["dist", "dist/browser", "dist/browser/a"]),
        ("./dist/", ["dist/a"], ["dist", "dist/a"]),
        ("dist", ["dist/dist/a"], ["dist", "dist/a"]),
        ("dist", ["dist/capsule.toml", "dist/a"], ["a", "capsule.toml"]),
        ("dist", ["site/dist/a"], ["dist", "dist/a"]),
        ("dist", ["distant/a"], ["a"]),
        (".", ["dist/a"], ["a"]),
    ],
)
async def test_a_single_folder_that_is_served_stays(
    room: Room, output: str, paths: list[str], names: list[str]
) -> None:
    found = await unpack(room, packed(*map(member, paths)), output=output)
    assert sorted(str(path.relative_to(found)) for path in found.rglob("*")) == names
