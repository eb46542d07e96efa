"""The files of stored sources, without a gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.deploys import sources
from gateway.deploys.sources import KEPT_SOURCES, Sources
from gateway.errors import RequestMalformed, RequestTooLarge, ServiceError


async def upload(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def stored(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.tar.gz"))


async def test_an_upload_is_stored_whole(tmp_path: Path) -> None:
    source = await Sources(tmp_path).receive("app_1", upload(b"\x1f", b"\x8bpacked", b" source"))
    path = Sources(tmp_path).path("app_1", source)
    assert stored(tmp_path) == [path]
    assert path.read_bytes() == b"\x1f\x8bpacked source"


@pytest.mark.parametrize(
    ("parts", "refusal"),
    [
        ((), RequestMalformed),
        ((b"", b""), RequestMalformed),
        ((b"PK\x03\x04",), RequestMalformed),
        ((b"\x1f\x8b1", b"234"), RequestTooLarge),
    ],
    ids=["empty", "empty-parts", "zip", "too-large"],
)
async def test_a_refused_upload_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...], refusal: type[ServiceError]
) -> None:
    monkeypatch.setattr(sources, "SOURCE_BYTES", 5)
    with pytest.raises(refusal):
        await Sources(tmp_path).receive("app_1", upload(*parts))
    assert stored(tmp_path) == []


async def test_a_broken_upload_leaves_nothing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"\x1f\x8b"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await Sources(tmp_path).receive("app_1", broken())
    assert stored(tmp_path) == []


def test_old_sources_are_those_beyond_the_newest(tmp_path: Path) -> None:
    files = Sources(tmp_path)
    assert files.list_old("app_1") == []
    (tmp_path / "app_1").mkdir()
    names = [f"src_{number:02}" for number in range(KEPT_SOURCES + 2)]
    for name in reversed(names):
        files.path("app_1", name).touch()
        assert files.list_old("app_1") == [] or len(stored(tmp_path)) > KEPT_SOURCES
    assert files.list_old("app_1") == names[:2]
    files.remove("app_1", {names[0], "src_gone"})
    assert files.list_old("app_1") == [names[1]]


def test_all_sources_of_one_app_are_removed(tmp_path: Path) -> None:
    files = Sources(tmp_path)
    for app in ("app_1", "app_2"):
        (tmp_path / app).mkdir()
        files.path(app, "src_1").touch()
    files.remove_all("app_1")
    assert stored(tmp_path) == [files.path("app_2", "src_1")]
