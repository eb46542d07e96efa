"""Archives of every format: as the gateway's own process takes them, and each of their faults in this process."""

import gzip
import io
import os
import random
import stat
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.records import App
from gateway.deploys import archives
from gateway.deploys.archives import Refused
from gateway.deploys.sources import LIMITS, Format, SourceLimits, Sources
from gateway.errors import RequestMalformed
from gateway.storage import FolderStorage

APP = App(id="app_1", name="notes", account="acc", createdAt="2026-11-21T12:00:00.000Z")
PAGE = b"<!doctype html><title>Notes</title>"


async def receive(
    folder: Path, content: bytes, declared: Format | None = None, limits: SourceLimits = LIMITS
) -> dict[str, Any]:
    """Returns the files of the stored source, by name."""

    async def upload() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 700):
            yield content[start : start + 700]

    source = await Sources(FolderStorage(folder), folder / "uploads", limits).receive(APP, upload(), None, declared)
    assert [*(folder / "uploads").iterdir()] == []
    with tarfile.open(folder / Sources.key("app_1", source)) as tar:
        return {member.name: member.isfile() and tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def packed(*entries: tuple[str | zipfile.ZipInfo, bytes], **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as made:
        for entry, content in entries:
            made.writestr(entry, content)
    return file.getvalue()


def entry(name: str, mode: int = stat.S_IFREG | 0o644, flags: int = 0) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo("x" * len(name))
    made.filename, made.orig_filename = name, name
    made.external_attr, made.flag_bits = mode << 16, flags
    return made


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


def tar_of(*members: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for each in members:
            tar.addfile(each, io.BytesIO(bytes(each.size)))
    return file.getvalue()


def tarred(*entries: tuple[str, int]) -> bytes:
    return tar_of(*(member(name, size=size) for name, size in entries))


def zipped(*entries: tuple[str, int]) -> bytes:
    return packed(*((name, b"\0" * size) for name, size in entries), compression=zipfile.ZIP_DEFLATED)


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    """Replaces a name in both headers of a zip, as no library would write it."""
    assert content.count(old) == 2
    assert len(old) == len(new)
    return content.replace(old, new)


async def test_a_zip_becomes_its_files(tmp_path: Path) -> None:
    content = packed(
        ("fr__h.html", PAGE),
        ("assets/", b""),
        ("assets/früh.js", b"x" * 100_000),
        (entry("run", stat.S_IFREG | 0o755), b"#!/bin/sh\n"),
        compression=zipfile.ZIP_DEFLATED,
    )
    content = replaced(content, b"fr__h.html", "früh.html".encode())  # in UTF-8, without saying so
    assert await receive(tmp_path, content) == {
        "früh.html": PAGE,
        "assets": False,
        "assets/früh.js": b"x" * 100_000,
        "run": b"#!/bin/sh\n",
    }


async def test_a_page_becomes_index_html(tmp_path: Path) -> None:
    for page in (b"\n <h1>Hello", b"\xef\xbb\xbf<!-- a comment -->", b"<html>" + b"x" * 100_000):
        assert await receive(tmp_path, page) == {"index.html": page}
    assert await receive(tmp_path, b"Hello", "page") == {"index.html": b"Hello"}


@pytest.mark.parametrize(
    ("content", "declared", "expected"),
    [
        (b"hello", None, "a tar.gz file, a zip file or an HTML page"),
        (PAGE, "zip", "a zip file"),
        (packed(("a", b"")), "page", "an HTML page"),
        (tarred(("a", 1)), "zip", "a zip file"),
    ],
    ids=range(4),  # an archive contains the time
)
async def test_other_files_are_refused(tmp_path: Path, content: bytes, declared: Format | None, expected: str) -> None:
    next_step = "send the HTML" if declared == "page" else "pack the folder"
    with pytest.raises(RequestMalformed, match=f"This is not {expected}; {next_step}"):
        await receive(tmp_path, content, declared)


async def test_the_process_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that asks for memory ends the process, and refuses the upload. The test's process has less of it."""
    program, limit = tmp_path / "archives.py", "MEMORY_BYTES, CPU_SECONDS, NICENESS = 512"
    program.write_text(Path(archives.__file__).read_text().replace(limit, limit.replace("512", "128"), 1))
    monkeypatch.setattr(archives, "__file__", str(program))
    made = tarfile.TarInfo("a")
    made.type, made.size = tarfile.XHDTYPE, 1 << 30
    bomb = gzip.compress(made.tobuf()) + gzip.compress(bytes(1_048_576)) * 129
    with pytest.raises(RequestMalformed, match="needs too much memory"):
        await receive(tmp_path, bomb)
    assert archives.MEMORY_BYTES == 512 << 20


# In this process


def check(content: bytes, files: int = LIMITS.files, unpacked: int = LIMITS.unpacked) -> None:
    """Raises Refused for a zip or a tar.gz outside the limits."""
    if content.startswith(b"PK"):
        archives.pack_zip(io.BytesIO(content), io.BytesIO(), files, unpacked)
    else:
        archives.check_tar(io.BytesIO(content), files, unpacked)


def encrypted() -> bytes:
    content = bytearray(packed(("secret.txt", b"x")))
    for header in (content.index(b"PK\3\4") + 6, content.index(b"PK\1\2") + 8):
        content[header] |= 1
    return bytes(content)


# A zip that programs could unpack differently.
FAULTY_ZIPS = [
    (replaced(packed(("a.html", b"1"), ("b.html", b"2")), b"b.html", b"a.html"), r"contains 'a\.html' twice"),
    (packed(("a.html", b""), ("./a.html", b"")), r"contains 'a\.html' twice"),
    (packed(("a/", b""), ("a", b"")), "contains 'a' twice"),
    (replaced(packed(("a/b.html", b"")), b"a/b.html", b"a\\b.html"), r"'a\\b\.html', a name with a backslash"),
    (
        packed((entry("link", stat.S_IFLNK | 0o777), b"/etc/passwd")),
        "the link 'link'; replace it with its file, or pack a tar.gz",
    ),
    (packed((entry("pipe", stat.S_IFIFO | 0o644), b"")), "'pipe', which is neither a file nor a folder"),
    (encrypted(), r"'secret\.txt', which is encrypted"),
    (packed(("/etc/x", b"")), "'/etc/x', which leaves its folder"),
    (packed(("a/../../x", b"")), r"'a/\.\./\.\./x', which leaves its folder"),
    (replaced(packed(("a_.html", b"")), b"a_.html", b"a\0.html"), r"'a\\x00\.html', which leaves its folder"),
    (packed(("a/", b"")), "no files"),
    (packed(("a.html", b"xyz")).replace(b"xyz", b"abc"), "can't be unpacked"),
]


@pytest.mark.parametrize(("content", "reason"), FAULTY_ZIPS, ids=range(len(FAULTY_ZIPS)))
def test_a_faulty_zip_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        check(content)


@pytest.mark.parametrize("pack", [tarred, zipped])
def test_the_same_bounds_hold_for_all(pack: Callable[..., bytes]) -> None:
    for names in (("./a", "a//b/c"), ("a/b/c", "x", "a/b")):
        with pytest.raises(Refused, match=r"both a file and a folder|below a file"):
            check(pack(*((name, 1) for name in names)))
    for name in ("é" * 128, f"a/{'b' * 256}/c", "/".join(["d" * 200] * 25)):
        with pytest.raises(Refused, match="a name that is too long"):
            check(pack((name, 1)))
    check(pack(("é" * 127, 1)))
    check(pack(*((f"{number}", 1) for number in range(10))), 10)
    check(pack(("a", 2 << 20), ("b", 1 << 20)), unpacked=3 << 20)
    with pytest.raises(Refused, match="more than 10 files"):
        check(pack(*((f"{number}", 1) for number in range(11))), 10)
    with pytest.raises(Refused, match="more than 3 MiB"):
        check(pack(("a", 2 << 20), ("b", (1 << 20) + 1)), unpacked=3 << 20)
    with pytest.raises(Refused, match="leaves its folder"):
        check(pack(("../x", 1)))


# Unpacked


def unpack(folder: Path, archive: bytes, output: str = "") -> list[str]:
    """Returns the names of what is in the folder then."""
    (folder / "source").mkdir()
    archives.unpack(io.BytesIO(archive), str(folder / "source"), LIMITS.files, LIMITS.unpacked, output)
    return sorted(str(path.relative_to(folder / "source")) for path in (folder / "source").rglob("*"))


FOLDER, LINK, HARD = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([member("/etc/x")], "leaves its folder"),
        ([member("a/../../x")], "leaves its folder"),
        ([member("..", FOLDER)], "leaves its folder"),
        ([member("a", LINK, "/etc/passwd")], "leaves its folder"),
        ([member("a/b", LINK, "../../x")], "leaves its folder"),
        ([member("l", LINK, "."), member("a/b", LINK, "../l/../../x")], "leaves its folder"),
        ([member(".", LINK, "..")], "leaves its folder"),
        ([member("l", LINK, "a"), member("l/x")], "through a link"),
        ([member("l", LINK, "a"), member("l")], "through a link"),
        ([member("l", LINK, "a"), member("l", HARD, "l")], "through a link"),
        ([member("a", HARD, "/etc/passwd")], "no earlier file"),
        # A hard link to a link would change the folder from which its `..` goes up.
        ([member("d/x"), member("d/x", LINK, "../t"), member("y", HARD, "d/x"), member("y/z")], "no earlier file"),
        ([member("d", tarfile.FIFOTYPE)], "not a file, a folder or a link"),
    ],
)
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, members: list[tarfile.TarInfo], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        unpack(tmp_path, tar_of(*members))
    assert os.listdir(tmp_path) == ["source"]


GOOD = gzip.compress(gzip.decompress(tarred(("page", 0))) + random.Random(1).randbytes(100_000))
DAMAGED = {
    "no tar": gzip.compress(b"nonsense" * 1_000),
    "half": GOOD[:50_000],
    "a byte short": GOOD[:-1],
    "half inside": gzip.compress(gzip.decompress(tarred(("page", 9_000)))[:5_000]),
    "another checksum": GOOD[:-8] + b"\0" * 8,
}


@pytest.mark.parametrize("archive", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_archive_is_refused(tmp_path: Path, archive: bytes) -> None:
    with pytest.raises(Refused, match="can't be unpacked"):
        unpack(tmp_path, archive)


# By macOS and Windows.
ADDED = ["__MACOSX/site/._index.html", ".DS_Store", "site/.DS_Store", "site/._index.html", "site/Thumbs.db"]


@pytest.mark.parametrize(
    ("paths", "output", "names"),
    [
        (["site/index.html", "site/a/b", *ADDED], "", ["a", "a/b", "index.html"]),
        (["./site/site/x", "./site/.hidden"], "", [".hidden", "site", "site/x"]),
        (["site/x", "capsule.toml", *ADDED], "", ["capsule.toml", "site", "site/x"]),
        (ADDED, "", []),
        # The folder that is served stays.
        (["dist/browser/a"], "dist/browser", ["dist", "dist/browser", "dist/browser/a"]),
        (["dist/dist/a"], "dist", ["dist", "dist/a"]),
        (["dist/capsule.toml", "dist/a"], "dist", ["a", "capsule.toml"]),
        (["site/dist/a"], "dist", ["dist", "dist/a"]),
        (["distant/a"], "dist", ["a"]),
    ],
)
def test_what_systems_add_is_dropped_and_a_single_folder_is_the_source(
    tmp_path: Path, paths: list[str], output: str, names: list[str]
) -> None:
    assert unpack(tmp_path, tar_of(*map(member, paths)), output) == names
