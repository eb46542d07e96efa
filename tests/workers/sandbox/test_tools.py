import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.folders import passable_folder
from tests.support.sandbox import ROOT, Room, checked_sandbox
from workers.sandbox import tools
from workers.sandbox.sandbox import BUILD_USERS

WITHOUT_OWN = "/nowhere"


def program(folder: Path, name: str, prints: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho {prints}\n")
    (folder / name).chmod(0o755)
    return folder


def test_the_machines_own_bubblewrap_comes_first_and_then_that_of_its_package(tmp_path: Path) -> None:
    own = program(tmp_path / "bin", "bwrap", "own")
    assert tools.find_bwrap(tmp_path, any_user=False, path=str(own)) == str(own / "bwrap")
    found = tools.find_bwrap(tmp_path / "copies", any_user=False, path=WITHOUT_OWN)
    assert found is not None
    assert subprocess.check_output([found, "--version"]).startswith(b"bubblewrap ")
    assert not (tmp_path / "copies").exists(), "nothing is copied without need"


def test_a_package_that_other_users_cannot_reach_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy includes the libraries, and other workers use the same copy."""
    monkeypatch.setattr(tools, "closed_folders", lambda folder: [folder])
    with passable_folder() as copies:
        found = [tools.find_bwrap(copies / "tools", any_user=True, path=WITHOUT_OWN) for _ in range(2)]
        assert found[0] == found[1]
        assert found[0] is not None
        assert Path(found[0]).is_relative_to(copies)
        command = [found[0], "--version"]
        if ROOT:
            command = ["setpriv", f"--reuid={BUILD_USERS[0]}", "--clear-groups", *command]
        assert subprocess.check_output(command).startswith(b"bubblewrap ")
        assert len([*(copies / "tools").iterdir()]) == 1


def test_without_package_and_program_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.importlib.metadata, "distribution", missing)
    assert tools.find_bwrap(tmp_path, any_user=False, path=WITHOUT_OWN) is None
    assert tools.find_node(WITHOUT_OWN, tmp_path) is None


def missing(name: str) -> None:
    raise tools.importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "used"), [("v22.18.0", True), ("v24.1.0", True), ("v22.9.1", False), ("v20.20.2", False), ("?", False)]
)
def test_a_nodejs_of_the_machine_is_used_unless_it_is_old(tmp_path: Path, version: str, used: bool) -> None:
    own = program(tmp_path / "bin", "node", version)
    found = tools.find_node(str(own), tmp_path / "tools")
    assert (found is None) is used
    if found is not None:
        shown = subprocess.check_output([f"{found}/node", "--version"], text=True)
        assert tuple(map(int, shown.removeprefix("v").split(".")[:2])) >= tools.OLDEST_NODE


async def test_builds_find_nodejs_and_npm(room: Room) -> None:
    assert (await room.run("node -p 'process.versions.node'; HOME=$PWD npm --version")).ok, room.lines
    assert tuple(map(int, room.lines[0].split(".")[:2])) >= tools.OLDEST_NODE
    assert room.lines[1][0].isdigit()


def test_other_versions_on_the_path_are_listed(tmp_path: Path) -> None:
    first, second = program(tmp_path / "first", "node", "v24.1.0"), program(tmp_path / "second", "node", "v20.20.2")
    program(first, "python3", "Python 3.11.2")
    program(first, "python3.11", "Python 3.11.2")
    program(second, "python3.12", "Python 3.12.4")
    program(second, "python3.13", "command not found")
    program(second, "python3.12-config", "Python 3.12.4")
    folders = [str(first), str(second)]
    found = tools.find_versions(folders, tmp_path / "tools", tools.ask_versions)
    made = found[-1].folder
    assert Path(made).is_relative_to(tmp_path / "tools")
    assert found == [
        tools.Program("Node.js", "24.1.0", str(first)),
        tools.Program("Node.js", "20.20.2", str(second)),
        tools.Program("Python", "3.11.2", str(first)),
        tools.Program("Python", "3.12.4", made),
    ]
    assert subprocess.check_output([f"{made}/python3"], text=True) == "Python 3.12.4\n"
    assert tools.find_versions(folders, tmp_path / "tools", tools.ask_versions) == found


def test_programs_that_commands_do_not_see_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each build has its own /tmp, and of a program elsewhere it may lack files."""
    with passable_folder() as hidden, tempfile.TemporaryDirectory(dir="/var/tmp") as top:
        folder = Path(top)
        folder.chmod(0o755)
        program(hidden / "bin", "node", "v99.0.0")
        program(folder / "lacking", "node", "v98.0.0")
        (folder / "bin").mkdir()
        (folder / "bin" / "node").symlink_to(folder / "lacking" / "node")
        monkeypatch.setenv("PATH", os.pathsep.join([f"{hidden}/bin", os.environ["PATH"], f"{folder}/bin"]))
        assert subprocess.check_output([f"{folder}/bin/node"]) == b"v98.0.0\n"
        sandbox = checked_sandbox(BUILD_USERS, hidden)
        versions = [(tool.name, tool.version) for tool in sandbox.tools]
        assert {"99.0.0", "98.0.0"}.isdisjoint(version for _, version in versions)
        assert f"{hidden}/bin" not in sandbox.path.split(os.pathsep)
        assert "Python" in dict(versions)
        assert len(set(versions)) == len(versions), "each version once"
