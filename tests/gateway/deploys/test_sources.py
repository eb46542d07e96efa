"""Stored sources are files, here without a gateway."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.accounts.records import App
from gateway.deploys import sources
from gateway.deploys.sources import KEPT_SOURCES, LIMITS, MAX_UPLOADS, SourceLimits, Sources
from gateway.errors import RateLimited, RequestMalformed, RequestTooLarge
from gateway.storage import FolderStorage


async def upload(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        if part == b"broken":
            raise ConnectionError
        yield part


def app(app_id: str) -> App:
    return App(id=app_id, name=app_id, account="acc", createdAt="2026-11-21T12:00:00.000Z")


def sources_in(folder: Path, limits: SourceLimits = LIMITS) -> Sources:
    return Sources(FolderStorage(folder), folder / "uploads", limits)


def path_of(folder: Path, app_id: str, source: str) -> Path:
    return folder / Sources.key(app_id, source)


@pytest.mark.parametrize(
    ("parts", "refusal"),
    [
        ((), RequestMalformed),
        ((b"PK\x03\x04",), RequestMalformed),
        ((b"\x1f\x8b1", b"234"), RequestTooLarge),
        ((b"\x1f\x8b", b"broken"), ConnectionError),
    ],
)
async def test_a_refused_upload_leaves_nothing(
    tmp_path: Path, parts: tuple[bytes, ...], refusal: type[Exception]
) -> None:
    with pytest.raises(refusal):
        await sources_in(tmp_path, SourceLimits(packed=5)).receive(app("app_1"), upload(*parts), None)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_unfinished_uploads_of_a_killed_gateway_are_removed(tmp_path: Path) -> None:
    (tmp_path / "uploads").mkdir()
    old, young = tmp_path / "uploads" / "src_old.part", tmp_path / "uploads" / "src_young.part"
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))
    await sources_in(tmp_path).receive(app("app_1"), upload(b"\x1f\x8b"), None)
    assert (old.exists(), young.exists()) == (False, True)


async def test_old_sources_are_those_beyond_the_newest(tmp_path: Path) -> None:
    files = sources_in(tmp_path)
    assert await files.list_old("app_1") == []
    (tmp_path / "sources" / "app_1").mkdir(parents=True)
    names = [f"src_{number:02}" for number in range(KEPT_SOURCES + 2)]
    for name in reversed(names):
        path_of(tmp_path, "app_1", name).touch()
    assert await files.list_old("app_1") == names[:2]
    await files.remove("app_1", {names[0], "src_gone"})
    assert await files.list_old("app_1") == [names[1]]
    (tmp_path / "sources" / "app_2").mkdir()
    path_of(tmp_path, "app_2", "src_1").touch()
    await files.remove_all("app_1")
    assert [*tmp_path.rglob("*.tar.gz")] == [path_of(tmp_path, "app_2", "src_1")]


async def test_an_account_has_two_uploads_at_once(tmp_path: Path) -> None:
    files, ended = sources_in(tmp_path), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"\x1f\x8b"
        await ended.wait()

    async def unread() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    uploads = [asyncio.create_task(files.receive(app("app_1"), slow(), None)) for _ in range(MAX_UPLOADS)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited):
        await files.receive(app("app_2"), unread(), None)
    with pytest.raises(RequestTooLarge):
        await files.receive(app("app_2"), unread(), sources.SOURCE_BYTES + 1)
    ended.set()
    await asyncio.gather(*uploads)
    await files.receive(app("app_2"), upload(b"\x1f\x8b"), None)
    assert not files._receiving
