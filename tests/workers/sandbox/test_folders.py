"""Walks of folders that change at the same time, and the removal of what a customer's processes have filled."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import nest, passable_folder
from workers.engine.app_data import AppData, give_files
from workers.sandbox import keeper
from workers.sandbox.folders import walk
from workers.sandbox.removal import remove_folder

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


@pytest.mark.parametrize(("depth", "name"), [(1_200, "d"), (3_000, "d" * 200)], ids=["deep", "longer-than-a-path"])
def test_a_deep_folder_is_removed(tmp_path: Path, depth: int, name: str) -> None:
    try:
        nest(tmp_path / "build", depth, name)
        remove_folder(tmp_path / "build")
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "build"], check=False)  # pytest's own cleaning recurses


def test_an_ordinary_user_removes_folders_without_permissions() -> None:
    with passable_folder() as folder:
        folder.chmod(0o777)
        (folder / "outside" / "kept").mkdir(parents=True)
        if (child := os.fork()) == 0:
            ended = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(65_534)
                    os.setuid(65_534)
                build_closed_folders(folder / "build")
                remove_folder(folder / "build")
                ended = 0
            finally:
                os._exit(ended)
        assert os.waitpid(child, 0)[1] == 0
        assert [path.name for path in folder.rglob("*")] == ["outside", "kept"], "the link is not followed"


def build_closed_folders(build: Path) -> None:
    folders = [build, build / "a", build / "a" / "b", build / "a" / "b" / "c", build / "z"]
    for folder in folders:
        folder.mkdir()
        (folder / "file").touch()
        (folder / "link").symlink_to(build.with_name("outside"))
    for folder in reversed(folders):
        folder.chmod(0)
