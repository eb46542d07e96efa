"""The storage: a folder, and S3 over HTTP."""

import asyncio
import contextlib
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway import storage as module
from gateway.errors import StorageFull, StorageUnavailable
from gateway.settings import BadSettings, Settings, load
from gateway.storage import (
    FolderStorage,
    S3Storage,
    Storage,
    fetch_object,
    open_storage,
    read_object,
    until_storage_answers,
)
from tests.support.logs import captured
from tests.support.s3_server import BUCKET, SECRET, S3Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE = os.urandom(12_000_000)  # of several parts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def s3(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    async with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if request.param == "folder":
        (tmp_path / "storage").mkdir()
        return open_storage(Settings(storage_url=f"file://{tmp_path}/storage"))
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return open_storage(Settings(storage_url=f"s3://{BUCKET}/{tmp_path.name}"))


async def test_objects_are_read_as_they_were_stored(storage: Storage, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(LARGE)
    await storage.put("archives/app/one.tar.gz", source)
    await storage.put("logs/day/one.gz", b"log")
    assert await fetch_object(storage, "archives/app/one.tar.gz", target, len(LARGE))
    assert target.read_bytes() == LARGE
    assert await read_object(storage, "logs/day/one.gz", 10) == b"log"
    await storage.put("logs/day/one.gz", b"another")
    assert await read_object(storage, "logs/day/one.gz", 10) == b"another"
    assert await storage.copy("archives/app/one.tar.gz", "archives/app/two.tar.gz")
    assert sorted(await storage.list_names("archives/app/")) == ["one.tar.gz", "two.tar.gz"]
    assert (await storage.list_folders("archives/"), await storage.list_folders("none/")) == (["app"], [])
    await storage.delete(["archives/app/one.tar.gz", "archives/app/none"])
    assert await storage.exists("archives/app/two.tar.gz")
    await storage.delete_folder("archives/app")
    assert await storage.list_names("archives/app/") == []
    assert await storage.list_names("logs/") == ["day/one.gz"], "nothing else is deleted"


async def test_objects_that_do_not_exist(storage: Storage, tmp_path: Path) -> None:
    with captured(module) as lines:
        assert await storage.open("logs/none") is None
        assert await read_object(storage, "logs/none", 10) is None
        assert not await fetch_object(storage, "logs/none", tmp_path / "target", 10)
        assert not await storage.exists("logs/none")
        assert not await storage.copy("logs/none", "logs/other")
    assert not lines


OUTSIDE = ("../outside", "logs/../../outside", "logs/../../outside/inside")
BAD_KEYS = (
    *("", "logs/..", "logs/.", "./logs", "logs//one", "logs/one/", "logs\\..\\one", "logs/\0one", "logs/o\nne"),
    *("logs/\x7f", "logs/\udcff", "l" * 256, "é" * 128, "logs/" * 205 + "o"),
)


async def test_no_key_and_no_prefix_leads_out_of_the_store(storage: Storage, tmp_path: Path) -> None:
    """Whatever the operation: nothing is read, written or deleted, and no error of another kind is raised."""
    await storage.put("logs/one", b"log")
    (tmp_path / "file").write_bytes(b"file")
    (tmp_path / "outside" / "inside").mkdir(parents=True)
    (tmp_path / "outside" / "inside" / "file").write_bytes(b"file")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    for key in (*OUTSIDE, *BAD_KEYS, f"{tmp_path}/outside", "../outside/inside/file"):
        for attempt in (
            *(storage.put(key, b"new"), storage.put(key, tmp_path / "file"), storage.open(key), storage.exists(key)),
            *(storage.copy(key, "logs/two"), storage.copy("logs/one", key), storage.delete([key])),
            *(read_object(storage, key, 10), fetch_object(storage, key, tmp_path / "file", 10)),
        ):
            await fails(attempt)
    for prefix in (*OUTSIDE, f"{tmp_path}/outside", "", "../outside/inside", "logs/..", "logs//"):
        for listing in (storage.list_names, storage.list_objects, storage.list_folders):
            await fails(listing(f"{prefix}/"))
        await fails(storage.delete_folder(prefix))
        await fails(storage.delete_folder(f"{prefix}/"))
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (tmp_path / "file").read_bytes() == b"file"
    assert await storage.list_names("logs/") == ["one"]


async def fails(attempt: Awaitable[Any]) -> None:
    with captured(module) as lines, pytest.raises(StorageUnavailable):
        await attempt
    assert [line["event"] for line in lines] == ["storage.failed"]


@pytest.mark.parametrize("link", ["logs", "logs/day", "logs/day/one", "logs/pipe"])
async def test_no_link_in_a_folder_is_followed(link: str, tmp_path: Path) -> None:
    """It may be of another user, who can write to the folder, and the worker is root."""
    (outside := tmp_path / "outside").mkdir()
    for path in (outside / "day" / "one", outside / "one", outside / "two"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"outside")
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    (tmp_path / "storage" / link).parent.mkdir(parents=True)
    if link == "logs/pipe":
        os.mkfifo(tmp_path / "storage" / link)
    else:
        (tmp_path / "storage" / link).symlink_to(outside / ("one" if link.endswith("one") else ""))
    storage = FolderStorage(tmp_path / "storage")

    async def attempt(call: Awaitable[Any]) -> Any:
        with contextlib.suppress(StorageUnavailable):
            return await call

    for key in ("logs/one", "logs/day/one", "logs/pipe"):
        assert await attempt(read_object(storage, key, 10)) is None
        assert not await storage.exists(key)
        assert not await attempt(storage.copy(key, "sources/copy"))
        await attempt(storage.delete([key]))
    for prefix in ("logs/", "logs/day/"):
        for listing in (storage.list_names, storage.list_objects, storage.list_folders):
            found = await attempt(listing(prefix))
            assert not [name for name in found or [] if name != "day" or link == "logs/day"]
        await attempt(storage.delete_folder(prefix))
    for key in ("logs/two", "logs/day/two"):
        await attempt(storage.put(key, b"new"))
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


async def test_no_more_than_the_limit_is_read(storage: Storage, tmp_path: Path) -> None:
    await storage.put("logs/large", LARGE)
    for attempt in (
        read_object(storage, "logs/large", 1_000),
        fetch_object(storage, "logs/large", tmp_path / "target", 1_000),
    ):
        with pytest.raises(StorageUnavailable):
            await attempt
    assert (tmp_path / "target").stat().st_size <= module.CHUNK_BYTES * 2


async def test_a_reader_never_finds_an_incomplete_object(tmp_path: Path) -> None:
    storage, whole = FolderStorage(tmp_path), {b"a" * 3_000_000, b"b" * 3_000_000}
    await storage.put("logs/one", max(whole))
    writing = asyncio.gather(*(storage.put("logs/one", text) for _ in range(10) for text in whole))
    while not writing.done():
        assert await read_object(storage, "logs/one", 3_000_000) in whole
    assert stat.S_IMODE((tmp_path / "logs" / "one").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o711


async def test_an_unavailable_storage_fails_in_time_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = S3Server(tmp_path)  # not started
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    storage, began = S3Storage(BUCKET, ""), time.monotonic()
    with captured(module) as lines, pytest.raises(StorageUnavailable) as raised:
        await storage.put("logs/one", b"log")
    assert time.monotonic() - began < module.CALL_SECONDS
    assert raised.value.status == 503
    assert [line["operation"] for line in lines] == ["put"]
    assert not [text for text in (SECRET, "test-key-id", str(server.port)) if text in f"{lines}{raised.value}"]


async def test_a_folder_that_is_not_mounted_is_unavailable(tmp_path: Path) -> None:
    storage = open_storage(Settings(storage_url=f"file://{tmp_path}/mount"))
    for attempt in (storage.open("logs/one"), storage.put("logs/one", b"log"), storage.list_names("logs/")):
        with pytest.raises(StorageUnavailable):
            await attempt
    assert not list(tmp_path.iterdir()), "nothing is written to the disk below"


async def test_waiting_work_continues_when_the_storage_is_back(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    storage = FolderStorage(tmp_path)
    waiting = asyncio.create_task(until_storage_answers(lambda: storage.put("logs/one", b"log")))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    (tmp_path / "logs").unlink()
    await asyncio.wait_for(waiting, 10)
    assert await read_object(storage, "logs/one", 10) == b"log"


@pytest.mark.parametrize(
    ("url", "more", "words"),
    [
        ("s3://bucket/prefix", {}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket", {"AWS_ACCESS_KEY_ID": "a"}, "also needs AWS_SECRET_ACCESS_KEY"),
        ("s3://id:hidden@bucket", {}, "must not contain credentials"),
        ("s3://", {}, "must be file:///folder or"),
        ("file://host/folder", {}, "must be file:///folder or"),
        ("ftp://host", {}, "must be file:///folder or"),
    ],
)
async def test_an_invalid_storage_url_is_explained_in_one_line(url: str, more: dict[str, str], words: str) -> None:
    with pytest.raises(BadSettings) as raised:
        load({"GATEWAY_STORAGE_URL": url, **more})
    [line] = str(raised.value).splitlines()
    assert line.startswith("GATEWAY_STORAGE_URL: ")
    assert words in line
    assert "hidden" not in line


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageFull) as raised:
        await FolderStorage(tmp_path).put("logs/one", b"log")
    assert (raised.value.status, raised.value.retry_after) == (507, None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


async def test_a_full_bucket_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server(tmp_path)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for status, code, full in (
        ("507 Insufficient Storage", "XMinioStorageFull", True),
        ("403 Forbidden", "QuotaExceeded", True),
        ("400 Bad Request", "XMinioAdminBucketQuotaExceeded", True),
        ("403 Forbidden", "AccessDenied", False),
    ):
        async with server.refusing(status, code):
            with pytest.raises(StorageUnavailable) as raised:
                await S3Storage(BUCKET, "").put("logs/one", b"log")
        assert isinstance(raised.value, StorageFull) == full, code
