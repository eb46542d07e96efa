"""Folders that a customer's processes have filled are removed, whatever is in them."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.folders import nest, passable_folder
from workers.sandbox.removal import remove_folder


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
