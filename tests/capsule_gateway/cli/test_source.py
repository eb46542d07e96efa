"""The files that `capsule deploys publish` uploads and omits. The dashboard and git omit the same."""

import io
import json
import os
import subprocess
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from capsule_gateway.cli import source
from capsule_gateway.cli.service import ServiceRefusal
from capsule_gateway.cli.source import IGNORE_FILES, pack_source
from gateway.deploys import sources
from tests.support.programs import require


def write_files(folder: Path, *paths: str, **texts: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    for name, text in texts.items():
        (folder / f".{name}").write_text(text)


def packed_names(folder: Path) -> list[str]:
    """Returns the names of the packed files, without ignore files."""
    with pack_source(folder) as packed, tarfile.open(fileobj=io.BytesIO(b"".join(packed.read_chunks()))) as tar:
        members = tar.getmembers()
        assert len(members) == packed.files
        assert all(member.isfile() or member.issym() for member in members)
        assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
        return sorted(member.name for member in members if member.name not in source.IGNORE_FILES)


def test_all_files_except_those_always_omitted(tmp_path: Path) -> None:
    kept = ["index.html", "src/a b.ts", "src/deep/ü.ts", ".npmrc", ".env.example", "git", "x.env"]
    write_files(tmp_path, *kept)
    write_files(tmp_path, ".git/HEAD", "node_modules/x/i.js", "packages/a/node_modules/y/i.js")
    write_files(tmp_path, ".env", ".env.local", ".env.production.local", "packages/a/.env")
    write_files(tmp_path, "packages/a/.git")  # that of a worktree is a file
    write_files(tmp_path, capsuleignore="!.env\n!node_modules\n!.git\n")
    assert packed_names(tmp_path) == sorted(kept)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_an_ignore_file_as_powershell_writes_it(tmp_path: Path, encoding: str) -> None:
    """Otherwise, what it excludes would be published."""
    write_files(tmp_path, "secret.txt", "index.html")
    (tmp_path / ".gitignore").write_bytes("secret.txt\r\n".encode(encoding))
    assert packed_names(tmp_path) == ["index.html"]


def test_the_repository_around_a_folder(tmp_path: Path) -> None:
    """Its ignore files apply, except to a folder that is named by hand. Outside of a repository, none of above do."""
    names = ("apps/shop/a", "apps/shop/a.log", "apps/shop/tmp/b", "dist/i.js")
    write_files(tmp_path, *names, gitignore="*.log\n/apps/shop/tmp\ndist\n")
    assert packed_names(tmp_path / "apps/shop") == ["a", "a.log", "tmp/b"]
    write_files(tmp_path, ".git/HEAD")
    assert packed_names(tmp_path / "apps/shop") == ["a"]
    assert packed_names(tmp_path / "dist") == ["i.js"]


def test_links(tmp_path: Path) -> None:
    write_files(tmp_path, "a", "sub/b", "sub/c")
    (tmp_path / "sub/up").symlink_to("../a")
    (tmp_path / "folder").symlink_to("sub")
    os.link(tmp_path / "a", tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    assert packed_names(tmp_path) == ["a", "folder", "second", "sub/b", "sub/c", "sub/up"]


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../outside"])
def test_a_link_out_of_the_folder(tmp_path: Path, target: str) -> None:
    write_files(tmp_path, "outside", "app/a")
    (tmp_path / "app/link").symlink_to(target)
    with pytest.raises(ServiceRefusal, match=r"link links to a file outside the folder"), pack_source(tmp_path / "app"):
        pass
    write_files(tmp_path / "app", capsuleignore="link\n")
    assert packed_names(tmp_path / "app") == ["a"]


def test_nothing_to_publish_and_an_invalid_pattern(tmp_path: Path) -> None:
    with pytest.raises(ServiceRefusal, match="nothing to publish"), pack_source(tmp_path):
        pass
    write_files(tmp_path, "a", gitignore="!\n")
    with pytest.raises(ServiceRefusal, match="invalid pattern"), pack_source(tmp_path):
        pass


def test_a_source_that_is_too_large(tmp_path: Path) -> None:
    assert source.SOURCE_BYTES == sources.SOURCE_BYTES
    (tmp_path / "noise").write_bytes(os.urandom(1 << 21))
    packing = pack_source(tmp_path, max_bytes=1 << 20)
    with pytest.raises(ServiceRefusal, match="the packed source exceeds 1 MB"), packing:
        pass


ROOT = Path(__file__).parents[3]
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/fixtures/ignored.json").read_text())
DASHBOARD = """
const { IgnoredFiles } = await import(process.argv[1]);
const publish = async ({ rules, ignored, kept }) => {
  const paths = [...ignored, ...kept], found = new IgnoredFiles();
  await found.read([...paths, ...Object.keys(rules)].map((path) => ({ path, file: new Blob([rules[path] ?? ""]) })));
  return paths.filter((path) => !found.has(path));
};
const { readFileSync } = await import("node:fs");
console.log(JSON.stringify(await Promise.all(JSON.parse(readFileSync(0)).map(publish))));
"""


def publish_with_command_line(folder: Path) -> set[str]:
    with pack_source(folder) as packed, tarfile.open(fileobj=io.BytesIO(b"".join(packed.read_chunks()))) as tar:
        return {name for name in tar.getnames() if Path(name).name not in IGNORE_FILES}


def publish_with_dashboard() -> list[set[str]]:
    """Returns the files of each case."""
    script = (ROOT / "gateway/pages/dashboard/ignored.js").as_uri()
    command = [require("node"), "--input-type=module", "-e", DASHBOARD, script]
    done = subprocess.run(command, input=json.dumps(CASES), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return [{*kept} for kept in json.loads(done.stdout)]


def publish_with_git(folder: Path) -> list[set[str]]:
    """The same. Each case is a folder of one repository."""
    git = [require("git"), "-C", str(folder)]
    subprocess.run([*git, "init", "--quiet"], check=True, timeout=30)
    paths = [[f"{number}/{path}" for path in list_paths(case)] for number, case in enumerate(CASES)]
    command, given = [*git, "check-ignore", "--no-index", "--stdin", "-z"], "\0".join(chain.from_iterable(paths))
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (0, 1), done.stderr
    ignored = {*done.stdout.split("\0")}
    return [{path.partition("/")[2] for path in own if path not in ignored} for own in paths]


def list_paths(case: dict[str, Any]) -> list[str]:
    return [*case["ignored"], *case["kept"]]


def test_ignored_files(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        for name, text in {**dict.fromkeys(list_paths(case), ""), **case["rules"]}.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    found = zip(CASES, publish_with_dashboard(), publish_with_git(tmp_path), strict=True)
    for number, (case, of_dashboard, of_git) in enumerate(found):
        kept = {*case["kept"]}
        if case.get("pathspec", True):  # it gives rules for folders less weight than git does
            assert publish_with_command_line(tmp_path / str(number)) == kept, case
        assert of_dashboard == kept, case
        if not case.get("always"):  # rules of our own beside git's
            assert of_git == kept, case
