"""Which files are left out by the command line, by the dashboard, and by git itself: the same cases for each."""

import io
import json
import subprocess
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

from capsule_gateway.cli.source import IGNORE_FILES, pack_source
from tests.support.programs import require

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
