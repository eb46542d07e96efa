import os
import shutil
from pathlib import Path

import pytest

from gateway.deploys.recognition import SourceFolder
from tests.support.sandbox import Room
from workers.sandbox.tools import NODE, PYTHON, Program
from workers.sandbox.versions import Versions, choose_versions

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
    "text",
    [*(">=18", ">= 18", "*", "24", "24.x", "v24", "^20.19.0 || >=22.12.0", "18 - 24", ">=18 <25"), ""],
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


OLDER, NEWER, NONE = [], ["/opt/capsule/python3.12/bin"], None


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        *((text, OLDER) for text in ("", ">=3.9", ">3.10", "~=3.11", "~=3.11.1", "==3.11.*", "==3.11.2", "<3.13")),
        *((text, OLDER) for text in (">=3.9,!=3.10.*", ">= 3.9, < 4", "^3.11", "3.11.*", "!=3.10.*", ">3.11")),
        *(
            (text, NEWER)
            for text in (">=3.12", ">=3.11.5", "~=3.12", "~3.12", "^3.12", "==3.12.*", ">=3.12,<4.0,!=3.13.1")
        ),
        *((text, NONE) for text in (">=3.13", "<3.9", "~=3.13", "^3.13", "==3.10.*", ">=3.12,<3.12.1", "^2.7 || ^4")),
    ],
)
def test_the_range_of_a_python_project(tmp_path: Path, text: str, folders: list[str] | None) -> None:
    shown = "this host has Python 3.11.2 and 3.12.4"
    for table in (f"[project]\nrequires-python = '{text}'", f"[tool.poetry.dependencies]\npython = '{text}'"):
        choice = choose(tmp_path, **{"pyproject.toml": table})
        assert choice.folders == (folders or [])
        assert choice.problem == ("" if folders is not None else f"pyproject.toml asks for Python {text}; {shown}")


NO_VERSIONS = ["lts/*", "lts/iron", "node", "twenty", ">=", "20 ||| 22", "18 - <", "18 - latest", "? - ["]


@pytest.mark.parametrize("text", NO_VERSIONS)
def test_what_is_no_version_is_named(tmp_path: Path, text: str) -> None:
    line = f".nvmrc asks for Node.js {text}, which is no version; using the default one"
    assert choose(tmp_path, **{".nvmrc": f"{text}\n"}) == Versions([], [line])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("pyproject.toml", text) for text in ("[", "[project]\nrequires-python = 3.12", "[tool]\npoetry = []")],
        *[("package.json", text) for text in ("", "[]", '{"engines": 1}', '{"engines": {"node": 20}}', "[" * 100_000)],
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


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("20")
    (tmp_path / ".nvmrc").symlink_to("elsewhere")
    assert choose(tmp_path) == Versions([], [])


def test_a_host_without_node(tmp_path: Path) -> None:
    (tmp_path / ".nvmrc").write_text("20")
    (tmp_path / "package.json").write_text('{"engines": {"node": ">=22"}}')  # perhaps of a project of Python
    lines = [
        f"{wish}; this host has no Node.js"
        for wish in (".nvmrc asks for Node.js 20", "package.json asks for Node.js >=22")
    ]
    assert choose_versions(SourceFolder(tmp_path), []) == Versions([], lines)


@pytest.mark.parametrize("program", ["node", "python3"])
async def test_a_sandbox_starts_each_version_that_it_lists(room: Room, program: str) -> None:
    name = {"node": NODE, "python3": PYTHON}[program]
    room.sandbox.check(room.folder)
    listed = [tool for tool in room.sandbox.tools if tool.name == name]
    assert listed or not shutil.which(program, path=os.defpath)
    for tool in listed:
        path = room.sandbox.prepend_path([tool.folder])["PATH"]
        assert (await room.run(f"PATH={path}; {program} --version")).ok, room.lines
        assert tool.version in room.lines.pop()
