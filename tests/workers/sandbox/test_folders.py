"""Walks of folders that change at the same time."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workers.engine.app_data import AppData, give_files
from workers.sandbox import keeper
from workers.sandbox.folders import walk

OTHERS_BYTES = 10_000_000


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which each of two folders becomes a link to another app's folder when the other one is read."""
    other, files = tmp_path / "other", tmp_path / "data" / "shop" / "files"
    (other / "deep").mkdir(parents=True)
    (other / "note").write_bytes(b"x" * OTHERS_BYTES)
    (other / "deep" / "note").write_bytes(b"x" * OTHERS_BYTES)
    for name in ("one", "two"):
        (files / name / "deep").mkdir(parents=True)
    scandir: Callable[[Any], Any] = os.scandir

    def swap(folder: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) else os.fspath(folder)
        for name, partner in (("one", "two"), ("two", "one")):
            if path.endswith(f"/{name}") and not (files / name).is_symlink():
                (files / partner).rename(tmp_path / "moved")
                (files / partner).symlink_to(other)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", swap)
    return files


def test_no_link_in_place_of_a_folder_is_followed(files: Path, tmp_path: Path) -> None:
    found = {Path(entry.path).relative_to(files).parts for entry in walk(files)}
    assert (tmp_path / "moved").exists()
    assert found in ({("one",), ("two",), (name, "deep")} for name in ("one", "two"))


def _measure_all(files: Path) -> int:
    return keeper._measure([str(files)], 1 << 40)[0]


@pytest.mark.parametrize("measure", [keeper.measure_data, _measure_all])
def test_no_files_of_others_are_measured(files: Path, measure: Callable[[Path], int]) -> None:
    assert measure(files) < OTHERS_BYTES


def test_no_files_of_others_are_given_or_fingerprinted(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def chown(path: Any, *_: int, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        top = str(path) if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
        given.append(os.path.realpath(top))

    monkeypatch.setattr(os, "chown", chown)
    give_files(files, 1, {os.getuid()})
    assert str(files / "one") in given or str(files / "two") in given
    assert str(tmp_path / "other" / "note") not in given
    assert AppData(tmp_path, "shop").fingerprint()


def test_only_the_named_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Iterator[Any]:
        raise OSError(errno.ENAMETOOLONG, "too long")

    monkeypatch.setattr(os, "scandir", fail)
    assert [*walk(tmp_path)] == []
    with pytest.raises(OSError, match="too long"):
        [*walk(tmp_path, [errno.ENAMETOOLONG])]
