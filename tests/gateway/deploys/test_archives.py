"""Uploads of every format, checked and packed by a process of its own as the gateway runs it."""

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.accounts.records import App
from gateway.deploys import archives
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


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    """Replaces a name in both headers of a zip, as no library would write it."""
    assert content.count(old) == 2
    assert len(old) == len(new)
    return content.replace(old, new)


async def test_a_zip_becomes_its_files(tmp_path: Path) -> None:
    content = packed(
        ("index.html", PAGE),
        ("assets/", b""),
        ("assets/früh.js", b"x" * 100_000),
        (entry("run", stat.S_IFREG | 0o755), b"#!/bin/sh\n"),
        compression=zipfile.ZIP_DEFLATED,
    )
    for declared in (None, "zip"):
        files = await receive(tmp_path, content, declared)
        assert files == {
            "index.html": PAGE,
            "assets": False,
            "assets/früh.js": b"x" * 100_000,
            "run": b"#!/bin/sh\n",
        }


async def test_names_in_utf8_that_do_not_say_so(tmp_path: Path) -> None:
    content = replaced(packed(("fr__h.html", PAGE)), b"fr__h.html", "früh.html".encode())
    assert await receive(tmp_path, content) == {"früh.html": PAGE}


@pytest.mark.parametrize(
    "page", [b"\n <h1>Hello", b"\xef\xbb\xbf<!-- a comment -->", b"<html>" + b"x" * 100_000], ids=range(3)
)
async def test_a_page_becomes_index_html(tmp_path: Path, page: bytes) -> None:
    assert await receive(tmp_path, page) == {"index.html": page}
    for declared in (page, b"Hello"):
        assert await receive(tmp_path, declared, "page") == {"index.html": declared}


def encrypted() -> bytes:
    content = bytearray(packed(("secret.txt", b"x")))
    for header in (content.index(b"PK\3\4") + 6, content.index(b"PK\1\2") + 8):
        content[header] |= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
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
        (packed(), "no files"),
        (packed(("a.html", b"x" * 5_000))[:3_000], "can't be unpacked"),
        (packed(("a.html", b"xyz")).replace(b"xyz", b"abc"), "can't be unpacked"),
    ],
    ids=range(14),
)
async def test_a_zip_that_programs_could_unpack_differently_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(RequestMalformed, match=reason):
        await receive(tmp_path, content)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def tarred(*entries: tuple[str, int]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, size in entries:
            made = tarfile.TarInfo(name)
            made.size = size
            tar.addfile(made, io.BytesIO(b"\0" * size))
    return file.getvalue()


def zipped(*entries: tuple[str, int]) -> bytes:
    return packed(*((name, b"\0" * size) for name, size in entries), compression=zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize("pack", [tarred, zipped])
@pytest.mark.parametrize(
    "names",
    [("./a", "a//b/c"), ("a/b/c", "x", "a/b")],
    ids=["below", "above"],
)
async def test_a_path_that_is_a_file_and_a_folder(
    tmp_path: Path, pack: Callable[..., bytes], names: tuple[str, ...]
) -> None:
    with pytest.raises(RequestMalformed, match=r"both a file and a folder|below a file"):
        await receive(tmp_path, pack(*((name, 1) for name in names)))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("pack", [tarred, zipped])
async def test_names_that_are_too_long(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    for name in ("é" * 128, f"a/{'b' * 256}/c", "/".join(["d" * 200] * 25)):
        with pytest.raises(RequestMalformed, match="a name that is too long"):
            await receive(tmp_path, pack((name, 1)))
    assert await receive(tmp_path, pack(("é" * 127, 1)))


@pytest.mark.parametrize("pack", [tarred, zipped])
async def test_the_same_limits_hold_for_all(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    limits = SourceLimits(files=10, unpacked=3 << 20)
    assert await receive(tmp_path, pack(*((f"{number}", 1) for number in range(10))), limits=limits)
    assert await receive(tmp_path, pack(("a", 2 << 20), ("b", 1 << 20)), limits=limits)
    with pytest.raises(RequestMalformed, match="more than 10 files"):
        await receive(tmp_path, pack(*((f"{number}", 1) for number in range(11))), limits=limits)
    with pytest.raises(RequestMalformed, match="more than 3 MiB"):
        await receive(tmp_path, pack(("a", 2 << 20), ("b", (1 << 20) + 1)), limits=limits)
    with pytest.raises(RequestMalformed, match="leaves its folder"):
        await receive(tmp_path, pack(("../x", 1)), limits=limits)


async def test_the_process_has_limits(tmp_path: Path) -> None:
    """A header that asks for memory ends the process, and refuses the upload."""
    made = tarfile.TarInfo("a")
    made.type, made.size = tarfile.XHDTYPE, 1 << 30
    bomb = gzip.compress(made.tobuf()) + gzip.compress(bytes(1_048_576)) * (archives.MEMORY_BYTES // 1_048_576 + 1)
    with pytest.raises(RequestMalformed, match="needs too much memory"):
        await receive(tmp_path, bomb)


@pytest.mark.parametrize(
    ("content", "declared", "expected"),
    [
        (b"hello", None, "a tar.gz file, a zip file or an HTML page"),
        (b"hello", "tar", "a tar.gz file"),
        (PAGE, "zip", "a zip file"),
        (PAGE, "tar", "a tar.gz file"),
        (packed(("a", b"")), "page", "an HTML page"),
        (tarred(("a", 1)), "zip", "a zip file"),
    ],
    ids=range(6),  # an archive contains the time
)
async def test_other_files_are_refused(tmp_path: Path, content: bytes, declared: Format | None, expected: str) -> None:
    next_step = "send the HTML" if declared == "page" else "pack the folder"
    with pytest.raises(RequestMalformed, match=f"This is not {expected}; {next_step}"):
        await receive(tmp_path, content, declared)
