import json
import os
import tomllib
from pathlib import Path

import pytest

from gateway.deploys.manifest import parse_manifest
from tests.support.command_line import Tool, run_in_terminal
from tests.support.frameworks import PROJECTS, Project


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.folder)
async def test_the_manifest_of_each_project(offline: Tool, tmp_path: Path, project: Project) -> None:
    folder = write(tmp_path / "My Shop", project.files)
    shown = (await offline("init", str(folder), "--json")).json
    assert not (folder / "capsule.toml").exists()
    run = await offline("init", str(folder))
    assert run.line.startswith(f"Found {project.rule}. Wrote capsule.toml: ")
    text = (folder / "capsule.toml").read_bytes()
    manifest = parse_manifest(text)
    assert manifest.name == ("project" if {"package.json", "pyproject.toml"} & {*project.files} else "my-shop")
    assert manifest.build is not None
    build = (manifest.build.command, manifest.build.start or "", "" if manifest.build.start else manifest.build.output)
    assert build == (project.command, project.start, project.output)
    assert {"found": project.rule, **tomllib.loads(text.decode())} == shown


async def test_a_manifest_that_exists_stays(offline: Tool, tmp_path: Path) -> None:
    write(tmp_path, {"capsule.toml": "# mine"})
    for options in ((), ("--json",)):
        assert "capsule.toml exists already" in await offline.refused("init", str(tmp_path), *options)
    assert (tmp_path / "capsule.toml").read_text() == "# mine"


async def test_a_project_that_lacks_something(offline: Tool, tmp_path: Path) -> None:
    package = json.dumps({"dependencies": {"@sveltejs/kit": "2"}})
    write(tmp_path, {"package.json": package})
    assert "@sveltejs/adapter-static" in await offline.refused("init", str(tmp_path))
    assert "@sveltejs/adapter-static" in await offline.refused("deploy", str(tmp_path))
    assert os.listdir(tmp_path) == ["package.json"]


async def test_a_project_that_is_not_built(offline: Tool, tmp_path: Path) -> None:
    files = write(tmp_path, {"go.mod": "", "main.go": "", "index.html": ""})
    for command in (("init",), ("init", "--json"), ("deploy", "--yes")):
        fault = await offline.refused(*command, str(files))
        assert "Found Go (go.mod), which the service builds only with settings." in fault
        assert 'into capsule.toml, for example: build = {start = "./server"}' in fault
    assert sorted(os.listdir(tmp_path)) == ["go.mod", "index.html", "main.go"]


# -- the first deploy of a folder ----------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write(tmp_path / "shop", {"index.html": ""})


async def test_deploy_asks_on_a_terminal(offline: Tool, page: Path) -> None:
    question = "Found static files. Write capsule.toml (serve the folder as it is), and deploy it as shop? [Y/n]"
    said = run_in_terminal(offline, "deploy", str(page), given="n\n")
    assert question in said
    assert os.listdir(page) == ["index.html"]
    said = run_in_terminal(offline, "deploy", str(page), given="\n")
    assert question in said
    assert "Wrote capsule.toml" in said
    assert "capsule login" in said, "it goes on"
    assert (page / "capsule.toml").exists()


async def test_deploy_does_not_ask_with_yes_or_without_a_terminal(offline: Tool, page: Path) -> None:
    said = run_in_terminal(offline, "deploy", str(page), "--yes")
    assert "Found static files. Wrote capsule.toml: serve the folder as it is." in said
    assert "[Y/n]" not in said
    (page / "capsule.toml").unlink()
    run = await offline("deploy", str(page))
    assert run.err.startswith("Found static files. Wrote capsule.toml: serve the folder as it is.\n")
    assert "Found" not in (await offline("deploy", str(page))).err, "there is a manifest now"
