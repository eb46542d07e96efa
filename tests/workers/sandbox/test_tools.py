import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.deploys.recognition import SourceFolder
from tests.support.folders import passable_folder
from tests.support.sandbox import ROOT, Room
from workers.sandbox import tools
from workers.sandbox.sandbox import BUILD_USERS
from workers.sandbox.tools import NODE, PYTHON, Program
from workers.sandbox.versions import Versions, choose_versions

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


TOOLS = [
    Program(NODE, "24.14.1", "/new"),
    Program(NODE, "20.20.2", "/old"),
    Program(NODE, "20.9.0", "/older"),
    Program(PYTHON, "3.11.2", "/usr/bin"),
    Program(PYTHON, "3.12.4", "/opt/capsule/python3.12/bin"),
]


def choose(folder: Path, **files: str) -> Versions:
    for name, text in files.items():
        (folder / name).write_text(text)
    return choose_versions(SourceFolder(folder), TOOLS)


def ask(folder: Path, text: str) -> Versions:
    return choose(folder, **{"package.json": f'{{"engines": {{"node": "{text}"}}}}'})


@pytest.mark.parametrize(
    "text", [">=18", ">= 18", "*", "24.x", "v24", "^20.19.0 || >=22.12.0", "18 - 24", ">=18 <25", ""]
)
def test_the_default_version_is_used_if_it_fits(tmp_path: Path, text: str) -> None:
    assert ask(tmp_path, text) == Versions([], [])


@pytest.mark.parametrize("text", ["20", "20.x", "^20.1", "~20.20", ">= 18 < 23", "18 || 20", "20.20.2", "<=20"])
def test_the_newest_version_that_fits_is_used(tmp_path: Path, text: str) -> None:
    assert ask(tmp_path, text) == Versions(["/old"], [f"package.json asks for Node.js {text}; using 20.20.2"])


@pytest.mark.parametrize("text", ["22", "^22.12.0", ">24", "25.x", "<20", "24.14.2", "~20.21"])
def test_a_range_without_a_version_here_is_a_problem(tmp_path: Path, text: str) -> None:
    shown = "this host has Node.js 24.14.1 and 20.20.2 and 20.9.0"
    assert ask(tmp_path, text) == Versions([], [], f"package.json asks for Node.js {text}; {shown}")


def test_a_pinned_version_that_is_missing_is_named(tmp_path: Path) -> None:
    """The default one of the range is used, if the project has a range."""
    missing = ".nvmrc asks for Node.js 22; this host has Node.js 24.14.1 and 20.20.2 and 20.9.0"
    assert choose(tmp_path, **{".nvmrc": "22"}) == Versions([], [missing])
    assert ask(tmp_path, ">=18") == Versions([], [missing])
    assert ask(tmp_path, "<23") == Versions(["/old"], [missing, "package.json asks for Node.js <23; using 20.20.2"])
    assert ask(tmp_path, ">=99").problem.startswith("package.json asks for Node.js >=99; this host has Node.js 24.14.1")
    assert choose(tmp_path, **{".nvmrc": "20"}) == Versions(["/old"], [".nvmrc asks for Node.js 20; using 20.20.2"])


RANGES = {
    "/usr/bin": [
        "",
        ">=3.9",
        "~=3.11",
        "~=3.11.1",
        "==3.11.*",
        "==3.11.2",
        ">=3.9,!=3.10.*",
        "^3.11",
        "3.11.*",
        ">3.11",
    ],
    "/opt/capsule/python3.12/bin": [">=3.12", ">=3.11.5", "~=3.12", "~3.12", "^3.12", ">=3.12,<4.0,!=3.13.1"],
    "": [">=3.13", "<3.9", "~=3.13", "^3.13", "==3.10.*", ">=3.12,<3.12.1", "^2.7 || ^4"],
}


@pytest.mark.parametrize(("text", "folder"), [(text, folder) for folder, texts in RANGES.items() for text in texts])
def test_the_range_of_a_python_project(tmp_path: Path, text: str, folder: str) -> None:
    shown = "this host has Python 3.11.2 and 3.12.4"
    for table in (f"[project]\nrequires-python = '{text}'", f"[tool.poetry.dependencies]\npython = '{text}'"):
        choice = choose(tmp_path, **{"pyproject.toml": table})
        assert choice.folders == ([folder] if folder.startswith("/opt") else [])
        assert choice.problem == ("" if folder else f"pyproject.toml asks for Python {text}; {shown}")


@pytest.mark.parametrize("text", ["lts/*", "node", "twenty", ">=", "20 ||| 22", "18 - <", "18 - latest", "? - ["])
def test_what_is_no_version_is_named(tmp_path: Path, text: str) -> None:
    line = f".nvmrc asks for Node.js {text}, which is no version; using the default one"
    assert choose(tmp_path, **{".nvmrc": f"{text}\n"}) == Versions([], [line])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("pyproject.toml", text) for text in ("[", "[project]\nrequires-python = 3.12", "[tool]\npoetry = []")],
        *[("package.json", text) for text in ("", "[]", '{"engines": {"node": 20}}', "[" * 100_000)],
        ("package.json", '{"engines": {"node": "' + "20 " * 50 + '"}}'),
        (".nvmrc", "20\x1b[31m"),
    ],
)
def test_what_names_no_version_asks_for_none(tmp_path: Path, name: str, text: str) -> None:
    assert choose(tmp_path, **{name: text}) == Versions([], [])


def test_a_file_for_one_version_precedes_a_range(tmp_path: Path) -> None:
    ask(tmp_path, ">=18")
    assert choose(tmp_path, **{".node-version": "v20.9.0\n"}).folders == ["/older"]
    assert choose(tmp_path, **{".nvmrc": "20\n"}).folders == ["/old"]


@pytest.mark.parametrize(("text", "folders"), [("3.12", 1), ("3.12.1\n3.11\n", 1), ("3.11", 0), ("3.13", 0), ("", 0)])
def test_python_is_chosen_by_its_minor_version(tmp_path: Path, text: str, folders: int) -> None:
    choice = choose(tmp_path, **{".python-version": text})
    assert choice.folders == ["/opt/capsule/python3.12/bin"] * folders
    if text == "3.13":
        assert choice.lines == [".python-version asks for Python 3.13; this host has Python 3.11.2 and 3.12.4"]


@pytest.mark.parametrize(("program", "name"), [("node", NODE), ("python3", PYTHON)])
async def test_a_sandbox_starts_each_version_that_it_lists(room: Room, program: str, name: str) -> None:
    room.sandbox.check(room.folder)
    listed = [tool for tool in room.sandbox.tools if tool.name == name]
    assert listed or not shutil.which(program, path=os.defpath)
    for tool in listed:
        path = room.sandbox.prepend_path([tool.folder])["PATH"]
        assert (await room.run(f"PATH={path}; {program} --version")).ok, room.lines
        assert tool.version in room.lines.pop()
