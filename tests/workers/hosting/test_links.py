"""`replace_link` leaves links alone that it cannot replace by a file or a folder."""

import os
from pathlib import Path

import pytest

from workers.hosting import links
from workers.hosting.links import replace_link


def test_a_link_to_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    assert not replace_link(os.fspath(tmp_path / "link"), os.fspath(tmp_path), os.geteuid())
    assert (tmp_path / "link").is_symlink()


def test_without_openat2_no_link_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page").touch()
    (tmp_path / "link").symlink_to("page")
    monkeypatch.setattr(links, "OPENAT2", 100_000)
    assert not replace_link(os.fspath(tmp_path / "link"), os.fspath(tmp_path), os.geteuid())
