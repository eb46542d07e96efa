"""`replace_link` replaces links also on a busy machine, and leaves those alone that it cannot replace."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.hosting import links
from workers.hosting.links import replace_link


def test_what_cannot_be_opened_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe, and everything on a system without openat2."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "page").touch()
    for name in ("pipe", "page"):
        (tmp_path / "link").symlink_to(name)
        assert not replace_link(os.fspath(tmp_path / "link"), os.fspath(tmp_path), os.geteuid())
        assert (tmp_path / "link").is_symlink()
        (tmp_path / "link").unlink()
        monkeypatch.setattr(links, "OPENAT2", 100_000)


RENAME = """
import os
os.mkdir("one")
print(flush=True)
while True:
    os.rename("one", "other")
    os.rename("other", "one")
"""


def test_links_are_replaced_while_others_rename_their_files(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "page").touch()
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-c", RENAME]
    with subprocess.Popen(command, cwd=tmp_path / "elsewhere", stdout=subprocess.PIPE) as renaming:
        try:
            assert renaming.stdout is not None
            renaming.stdout.readline()
            for n in range(2_000):
                (tmp_path / "a" / f"{n}").symlink_to("../page")
                assert replace_link(os.fspath(tmp_path / "a" / f"{n}"), os.fspath(tmp_path), os.geteuid())
        finally:
            renaming.kill()
