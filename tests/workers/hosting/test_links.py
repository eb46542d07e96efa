"""Releases from when they held links lose them, and nothing outside of their files is taken in."""

import os
from pathlib import Path

import pytest

from gateway.ids import new_id
from tests.support.hosted_apps import Hosting
from workers.hosting import links
from workers.hosting.links import remove_links, replace_link


def test_old_releases_lose_their_links(tmp_path: Path) -> None:
    hosting = Hosting(tmp_path)
    (tmp_path / "secret").write_text("of another tenant")
    deploy = new_id("dep")
    site = hosting.publish(deploy, {"index.html": "home", "v2/page": "two"})
    files = site.release(deploy) / "files"
    (files / "leak").symlink_to(os.path.relpath(tmp_path / "secret", files))
    (files / "absolute").symlink_to(tmp_path / "secret")
    (files / "v2" / "self").symlink_to(".")
    (files / "latest").symlink_to("v2")
    (files / "home").symlink_to("index.html")
    hosting.releases.remove_links()
    found = {os.fspath(path.relative_to(files)): path.read_text() for path in files.rglob("*") if path.is_file()}
    assert found == {"index.html": "home", "home": "home", "v2/page": "two", "latest/page": "two"}
    assert not [path for path in files.rglob("*") if path.is_symlink()]
    assert remove_links(os.fspath(files)) == []


def test_folders_that_name_each_other_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST", 50)
    for here, there in ("ab", "ba"):
        (tmp_path / here).mkdir()
        (tmp_path / here / there).symlink_to(f"../{there}")
    remove_links(os.fspath(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]


def test_what_is_no_file_is_not_taken_in(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    assert not replace_link(os.fspath(tmp_path / "link"), os.fspath(tmp_path), os.geteuid())
    assert (tmp_path / "link").is_symlink()


def test_without_openat2_every_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page").touch()
    (tmp_path / "link").symlink_to("page")
    monkeypatch.setattr(links, "OPENAT2", 100_000)
    assert not replace_link(os.fspath(tmp_path / "link"), os.fspath(tmp_path), os.geteuid())
