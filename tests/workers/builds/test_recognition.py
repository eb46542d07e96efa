"""Sources without a manifest, from end to end: real projects with their packages from npm and PyPI."""

import json
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio

from capsule_gateway.dev.registries import find_registries
from gateway.accounts.records import Build
from gateway.deploys.manifest import Manifest, ManifestBuild
from gateway.settings.addresses import read_build_registries
from tests.fakes import FakeProvider
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, account_on, hosting
from tests.support.fixtures import module_fixture
from tests.support.frameworks import PROJECTS, TEXT, Project
from workers.builds.recognition import choose_build, is_built_by_tool
from workers.builds.registries import Registries
from workers.builds.source import DeployError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
BUILD_SECONDS = 600.0
PUBLIC = "npm=https://registry.npmjs.org,pip=https://pypi.org/simple"
# One for each way to get packages. The others take most of an hour, so `make test-frameworks` alone builds them.
OFTEN = ("static", "vite", "next", "pnpm", "bun", "fastapi", "uv")
BUILT = [project for project in PROJECTS if project.folder in OFTEN or os.environ.get("FRAMEWORKS") == "all"]


def require_registries(setting: str) -> None:
    """Skips tests on a machine that can't reach the package registries. In CI, they fail."""
    for endpoint in Registries(read_build_registries(setting)).endpoints:
        try:
            socket.create_connection(endpoint, timeout=10).close()
        except OSError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the package registry {endpoint[0]} can't be reached: {error}")


@module_fixture
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """A deployment whose builds use the package registries of this machine."""
    folder = tmp_path_factory.mktemp("frameworks")
    registries = await find_registries(folder)
    require_registries(registries.get("GATEWAY_BUILD_REGISTRIES", PUBLIC))
    async with FakeProvider() as provider, hosting(provider, folder, GATEWAY_CANARY="0.2") as host:
        await host.worker("deploys", **registries)
        yield host


@pytest_asyncio.fixture(loop_scope="session")
async def host(deployment: Host) -> AsyncIterator[Host]:
    async with account_on(deployment) as host:
        yield host


@pytest.mark.parametrize("project", BUILT, ids=lambda project: project.folder)
async def test_a_project_is_built_and_served_as_it_is(host: Host, project: Project) -> None:
    app = await host.app()
    deploy_id = await host.publish(app, project.files)
    deploy = await host.in_state(deploy_id, "live", "failed", "canceled", timeout=BUILD_SECONDS)
    assert deploy["state"] == "live", deploy["log"]
    first, *_ = deploy["log"].splitlines()
    assert first.startswith(f"Recognised as {project.rule}"), first
    assert TEXT in await host.page(app)


async def test_a_source_that_is_served_as_it_is(host: Host) -> None:
    """Files of a server beside a page are not served, and a source without a page fails at once."""
    app = await host.app()
    files = {"index.html": TEXT, "Procfile": "web: x", "server.js": "secret()", "app.js": "x", "capsule.toml": ""}
    files |= {f"z\n{number}.php": "<?php" for number in range(20)}
    deploy = await host.over(await host.publish(app, files))
    assert deploy["state"] == "live", deploy["log"]
    assert "Left out, because visitors must not read them: Procfile, server.js and 20 more\n" in deploy["log"]
    answers = {name: await host.web.get(f"/{quote(name)}", headers={"Host": f"{app}.{DOMAIN}"}) for name in files}
    assert [name for name, answer in answers.items() if answer.text == files[name]] == ["index.html", "app.js"]
    failed = await host.over(await host.publish(app, {"site/index.html": "", "docs/a": ""}))
    assert failed["error"].startswith("build: There is no index.html at the top"), failed["error"]


# Without a deployment


PACKAGE = {"dependencies": {"vite": "8"}, "scripts": {"build": "exit 1"}}
MADE = Build("mkdir dist && cp page dist/index.html")


@pytest.mark.parametrize(
    ("files", "manifest", "own", "expected"),
    [
        ({}, Manifest("app"), None, Build(output=".")),
        ({}, Manifest(build=ManifestBuild(MADE.command)), Build("make"), MADE),
        ({}, Manifest("app"), MADE, MADE),
        ({}, None, MADE, MADE),
        ({}, None, None, Build("npm install && npm run build", "dist")),
        (
            {"index.html": "", "site/a/index.html": ""},
            None,
            Build(output="site"),
            "at the top of site; found: index.html",
        ),
        ({"index.html": None, "docs/a/index.html": ""}, Manifest("app"), None, "; found: docs/a/index.html"),
        ({"hugo.toml": "", "package.json": None}, None, None, "Found Hugo (hugo.toml)"),
    ],
)
async def test_the_manifest_and_the_setting_of_the_app_come_first(
    tmp_path: Path, files: dict[str, str | None], manifest: Manifest | None, own: Build | None, expected: Build | str
) -> None:
    for name, text in {"package.json": json.dumps(PACKAGE), "index.html": "", **files}.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    lines: list[str] = []
    if isinstance(expected, str):
        with pytest.raises(DeployError, match=re.escape(expected)):
            choose_build(tmp_path, manifest, own, lines.append)
    else:
        assert choose_build(tmp_path, manifest, own, lines.append) == expected
        assert bool(lines) == (manifest is own is None)


async def test_whether_a_tool_writes_what_is_served(tmp_path: Path) -> None:
    """The command may be the app's own, as in a manifest that `capsule init` has written."""
    for package, build, expected in (
        ({"devDependencies": {"vite": "7"}}, Build("npm ci && npm run build", "./dist/"), True),
        ({"devDependencies": {"vite": "7"}}, Build("npm run build", "public"), False),
        ({"devDependencies": {"vite": "7"}}, Build("", "dist"), False),
        ({"devDependencies": {"vite": "7"}}, Build("npm run build", "dist", "node server.js"), False),
        ({"devDependencies": {"@sveltejs/kit": "2"}}, Build("npm run build", "build"), False),
        ({"dependencies": {"express": "5"}, "scripts": {"start": "node ."}}, Build("npm run build", "dist"), False),
        ({}, Build("make", "."), False),
    ):
        (tmp_path / "package.json").write_text(json.dumps(package))
        assert is_built_by_tool(tmp_path, build) is expected, (package, build)
