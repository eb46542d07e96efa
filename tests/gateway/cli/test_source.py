"""What travels with `capsule deploys publish`, and what is left out."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from gateway.cli import source
from gateway.cli.service import Refused
from gateway.cli.source import pack
from gateway.deploys import sources


def lay(folder: Path, *paths: str, **texts: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    for name, text in texts.items():
        path = folder / {"gitignore": ".gitignore", "capsuleignore": ".capsuleignore"}[name]
        path.write_text(text)


def names(folder: Path) -> list[str]:
    with pack(folder) as archive, tarfile.open(fileobj=io.BytesIO(b"".join(archive.read_chunks()))) as tar:
        members = tar.getmembers()
        assert len(members) == archive.files
        assert all(member.isfile() or member.issym() for member in members)
        assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
        return sorted(member.name for member in members if member.name not in source.IGNORE_FILES)


def test_everything_but_what_never_travels(tmp_path: Path) -> None:
    lay(
        tmp_path,
        "index.html",
        "src/a b.ts",
        "src/deep/ü.ts",
        ".npmrc",
        ".env.example",
        ".env.production",
        "git",
        "x.env",
    )
    lay(tmp_path, ".git/HEAD", "node_modules/x/i.js", "packages/a/node_modules/y/i.js")
    lay(tmp_path, ".env", ".env.local", ".env.production.local", "packages/a/.env")
    lay(tmp_path, capsuleignore="!.env\n!node_modules\n!.git\n")
    expected = [
        "index.html",
        "src/a b.ts",
        "src/deep/ü.ts",
        ".npmrc",
        ".env.example",
        ".env.production",
        "git",
        "x.env",
    ]
    assert names(tmp_path) == sorted(expected)


def test_a_worktrees_git_is_a_file(tmp_path: Path) -> None:
    lay(tmp_path, "a", ".git")
    assert names(tmp_path) == ["a"]


def test_ignore_files(tmp_path: Path) -> None:
    lay(tmp_path, "a.log", "keep.log", "dist/i.js", "src/dist/i.js", "src/build/x", "build/x", "notes/a.md", "ü")
    lay(tmp_path, gitignore="*.log\n!keep.log\ndist/\n/build\n# a comment\n\n", capsuleignore="notes\n")
    assert names(tmp_path) == sorted(["keep.log", "src/build/x", "ü"])


def test_capsuleignore_takes_back(tmp_path: Path) -> None:
    lay(tmp_path, "dist/i.js", "a.log", gitignore="dist\n*.log\n", capsuleignore="!dist\n")
    assert names(tmp_path) == ["dist/i.js"]


def test_a_folders_own_ignore_file_counts_there(tmp_path: Path) -> None:
    lay(tmp_path, "a/x", "a/y", "b/x", "b/y", gitignore="y\n")
    lay(tmp_path / "a", gitignore="/x\n!y\n")
    assert names(tmp_path) == ["a/.gitignore", "a/y", "b/x"]


def test_the_repository_around_a_folder(tmp_path: Path) -> None:
    lay(tmp_path, ".git/HEAD", "apps/shop/a", "apps/shop/a.log", "apps/shop/tmp/b", gitignore="*.log\n/apps/shop/tmp\n")
    assert names(tmp_path / "apps/shop") == ["a"]


def test_an_ignored_folder_named_by_hand(tmp_path: Path) -> None:
    lay(tmp_path, ".git/HEAD", "dist/i.js", gitignore="dist\n")
    assert names(tmp_path / "dist") == ["i.js"]


def test_above_no_repository_nothing_counts(tmp_path: Path) -> None:
    lay(tmp_path, "app/a", gitignore="a\n")
    assert names(tmp_path / "app") == ["a"]


def test_links(tmp_path: Path) -> None:
    lay(tmp_path, "a", "sub/b", "sub/c")
    (tmp_path / "sub/up").symlink_to("../a")
    (tmp_path / "folder").symlink_to("sub")
    os.link(tmp_path / "a", tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == ["a", "folder", "second", "sub/b", "sub/c", "sub/up"]


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../outside"])
def test_a_link_that_leads_out(tmp_path: Path, target: str) -> None:
    lay(tmp_path, "outside", "app/a")
    (tmp_path / "app/link").symlink_to(target)
    with pytest.raises(Refused, match=r"link links to a file outside of the folder"), pack(tmp_path / "app"):
        pass
    lay(tmp_path / "app", capsuleignore="link\n")
    assert names(tmp_path / "app") == ["a"]


def test_nothing_to_publish(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nothing to publish"), pack(tmp_path):
        pass


def test_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source.LIMIT == sources.SOURCE_BYTES
    monkeypatch.setattr(source, "LIMIT", 1 << 20)
    (tmp_path / "noise").write_bytes(os.urandom(1 << 21))
    with pytest.raises(Refused, match="the packed source is over 1 MB"), pack(tmp_path):
        pass


def test_an_invalid_pattern(tmp_path: Path) -> None:
    lay(tmp_path, "a", gitignore="!\n")
    with pytest.raises(Refused, match="invalid pattern"), pack(tmp_path):
        pass
