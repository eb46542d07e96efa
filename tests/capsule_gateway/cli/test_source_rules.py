"""Which files are left out by the command line, by the dashboard, and by git itself: the same cases for each."""

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from capsule_gateway.cli.source import IGNORE_FILES, pack_source
from tests.support.programs import require

ROOT = Path(__file__).parents[3]
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/fixtures/ignored.json").read_text())
DASHBOARD = """
const { IgnoredFiles } = await import(process.argv[1]);
const { rules, paths } = JSON.parse(process.argv[2]);
const ignored = new IgnoredFiles();
const read = (path) => ({ path, file: new Blob([rules[path] ?? ""]) });
await ignored.read([...paths, ...Object.keys(rules)].map(read));
console.log(JSON.stringify(paths.filter((path) => !ignored.has(path))));
"""


def publish_with_command_line(folder: Path) -> set[str]:
    with pack_source(folder) as packed, tarfile.open(fileobj=io.BytesIO(b"".join(packed.read_chunks()))) as tar:
        return {name for name in tar.getnames() if Path(name).name not in IGNORE_FILES}


def publish_with_dashboard(case: dict[str, Any], paths: list[str]) -> set[str]:
    script = (ROOT / "gateway/pages/dashboard/ignored.js").as_uri()
    given = json.dumps({"rules": case["rules"], "paths": paths})
    command = [require("node"), "--input-type=module", "-e", DASHBOARD, script, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return {*json.loads(done.stdout)}


def publish_with_git(folder: Path, paths: list[str]) -> set[str]:
    git = [require("git"), "-C", str(folder)]
    subprocess.run([*git, "init", "--quiet"], check=True, timeout=30)
    command = [*git, "check-ignore", "--no-index", "--stdin", "-z"]
    done = subprocess.run(command, input="\0".join(paths), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (0, 1), done.stderr
    return {*paths} - {*done.stdout.split("\0")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr("".join(case["rules"].values()))[1:40])
def test_ignored_files(tmp_path: Path, case: dict[str, Any]) -> None:
    paths = [*case["ignored"], *case["kept"]]
    for name, text in {**dict.fromkeys(paths, ""), **case["rules"]}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kept = {*case["kept"]}
    if case.get("pathspec", True):  # it gives rules for folders less weight than git does
        assert publish_with_command_line(tmp_path) == kept
    assert publish_with_dashboard(case, paths) == kept
    if not case.get("always"):  # rules of our own beside git's
        assert publish_with_git(tmp_path, paths) == kept
