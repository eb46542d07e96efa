"""The templates as `capsule new` writes them. tests/browser/test_template.py builds and uses them."""

import json
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest

from capsule_gateway.cli.folders import write_template
from gateway.deploys.templates import TEMPLATES

pytestmark = pytest.mark.parametrize("kind", ["full", "static"])


@pytest.fixture
def folder(kind: Literal["full", "static"], tmp_path: Path) -> Path:
    write_template("my-notes", kind, tmp_path / "app")
    return tmp_path / "app"


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_apps_name_is_in_all_its_places(folder: Path, kind: str) -> None:
    files = texts(folder)
    assert not [name for name, text in files.items() if "__NAME__" in text]
    named = {name for name, text in files.items() if "my-notes" in text}
    page = {"full": "index.html", "static": "site/index.html"}[kind]
    packages = {"package.json", "package-lock.json"} if kind == "full" else set()
    assert named == {"capsule.toml", "README.md", page, *packages}
    assert "<title>my-notes</title>" in files[page]


def test_the_browser_module_is_the_one_of_the_package(folder: Path) -> None:
    [copy] = folder.rglob("ai.js")
    assert {path.name for path in copy.parent.iterdir()} == {path.name for path in (TEMPLATES / "lib").iterdir()}
    assert copy.read_bytes() == (TEMPLATES / "lib" / "ai.js").read_bytes()


def test_each_imported_file_is_there(folder: Path) -> None:
    for name, text in texts(folder).items():
        for imported in re.findall(r"""(?:from|import) ["'](\.[^"']+)["']""", text):
            if name.endswith((".js", ".ts")):
                assert (folder / name).parent.joinpath(imported).is_file(), (name, imported)


def test_packages_come_from_whichever_registry_npm_uses(folder: Path, kind: str) -> None:
    """npm puts its own registry in the place of the public one."""
    if kind == "static":
        assert not [*folder.rglob("package*.json")]
        return
    lock = json.loads((folder / "package-lock.json").read_text())["packages"]
    resolved = {entry["resolved"] for entry in lock.values() if "resolved" in entry}
    assert {urlsplit(url).hostname for url in resolved - {"vendor/capsule-ai"}} <= {"registry.npmjs.org"}
    outside = {name for name, entry in lock.items() if name.startswith("node_modules/") and not entry.get("link")}
    assert all(lock[name]["integrity"].startswith("sha512-") for name in outside)
    assert len(outside) > 10
