"""Sources without a manifest, from end to end: real projects with their packages from npm and PyPI."""

import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio

from capsule_gateway.dev.registries import find_registries
from gateway.accounts.records import Build
from gateway.settings.addresses import read_build_registries
from tests.fakes import FakeProvider
from tests.support.accounts import DOMAIN
from tests.support.deployment import Host, account_on, hosting
from tests.support.fixtures import module_fixture
from tests.support.frameworks import PROJECTS, TEXT, Project
from workers.builds.recognition import is_built_by_tool
from workers.builds.registries import Registries

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


@pytest.mark.parametrize(
    ("files", "build", "error"),
    [
        ({"docs/a/index.html": "", "site/index.html": ""}, None, "found: site/index.html, docs/a/index.html"),
        ({"site/a.txt": "", "index.html": ""}, {"output": "site"}, "There is no index.html at the top of site"),
        ({"hugo.toml": "", "index.html": ""}, None, "Found Hugo (hugo.toml)"),
        (
            {"package.json": '{"scripts": {"start": "node ."}, "engines": {"node": "1"}}'},
            None,
            "package.json asks for Node.js 1; this host has Node.js ",
        ),
    ],
)
async def test_what_can_not_be_served_fails_at_once(
    host: Host, files: dict[str, str], build: dict[str, str] | None, error: str
) -> None:
    app = await host.app(**({"build": build} if build else {}))
    deploy = await host.over(await host.publish(app, files))
    assert deploy["state"] == "failed", deploy["log"]
    assert deploy["error"].startswith("build: "), deploy["error"]
    assert error in deploy["error"]


@pytest.mark.parametrize(
    ("files", "build"),
    [
        ({"capsule.toml": 'name = "app"\n', "index.html": TEXT}, None),
        ({"capsule.toml": "[build]\ncommand = 'mkdir dist && cp page dist/index.html'\n", "page": TEXT}, None),
        ({"page": TEXT}, {"command": "mkdir dist && cp page dist/index.html"}),
    ],
    ids=["manifest", "manifest-with-build", "setting"],
)
async def test_a_manifest_and_the_setting_of_the_app_come_first(
    host: Host, files: dict[str, str], build: dict[str, str] | None
) -> None:
    app = await host.app(**({"build": build} if build else {}))
    package = '{"dependencies": {"vite": "8"}, "scripts": {"build": "exit 1"}}'
    deploy = await host.over(await host.publish(app, {"package.json": package, **files}))
    assert deploy["state"] == "live", deploy["log"]
    assert "Recognised" not in deploy["log"]
    assert await host.page(app) == TEXT


async def test_files_of_a_server_beside_a_page_are_not_served(host: Host) -> None:
    app = await host.app()
    files = {"index.html": TEXT, "Dockerfile": "FROM x", "Procfile": "web: x", "server.js": "secret()", "app.js": "x"}
    files |= {f"z\n{number}.php": "<?php" for number in range(20)}
    deploy = await host.over(await host.publish(app, files))
    assert deploy["state"] == "live", deploy["log"]
    assert (
        "Left out, because visitors must not read them: Dockerfile, Procfile, server.js and 20 more\n" in deploy["log"]
    )
    answers = {name: await host.web.get(f"/{quote(name)}", headers={"Host": f"{app}.{DOMAIN}"}) for name in files}
    assert [name for name, answer in answers.items() if answer.text == files[name]] == ["index.html", "app.js"]


async def test_the_output_of_a_recognized_start_command(host: Host) -> None:
    app = await host.app()
    server = (
        "console.log('listening'); require('http').createServer((_, answer) => answer.end()).listen(process.env.PORT)"
    )
    files = {"package.json": '{"scripts": {"start": "node server.js"}}', "server.js": server, ".nvmrc": "1"}
    deploy = await host.over(await host.publish(app, files))
    assert deploy["state"] == "live", deploy["log"]
    assert ".nvmrc asks for Node.js 1; this host has Node.js " in deploy["log"]
    answer = await host.account.call("GET", f"/account/apps/{app}/logs")
    assert "listening" in answer.text.splitlines()
    other = await host.app()
    await host.over(await host.publish(other, {"index.html": TEXT}))
    answer = await host.account.call("GET", f"/account/apps/{other}/logs")
    assert (answer.status_code, "no start command" in answer.json()["error"]["message"]) == (404, True)


async def test_a_published_output_folder_is_served(host: Host) -> None:
    app = await host.app(build={"output": "dist"})
    for files in ({"dist/index.html": TEXT}, {"site/dist/index.html": TEXT}):
        deploy = await host.over(await host.publish(app, files))
        assert deploy["state"] == "live", deploy["log"]
        assert await host.page(app) == TEXT


@pytest.mark.parametrize(
    ("package", "build", "expected"),
    [
        ({"devDependencies": {"vite": "7"}}, Build("npm ci && npm run build", "./dist/"), True),
        ({"devDependencies": {"vite": "7"}}, Build("npm run build", "public"), False),
        ({"devDependencies": {"vite": "7"}}, Build("", "dist"), False),
        ({"devDependencies": {"vite": "7"}}, Build("npm run build", "dist", "node server.js"), False),
        ({"devDependencies": {"@sveltejs/kit": "2"}}, Build("npm run build", "build"), False),
        ({"dependencies": {"express": "5"}, "scripts": {"start": "node ."}}, Build("npm run build", "dist"), False),
        ({}, Build("make", "."), False),
    ],
)
async def test_whether_a_tool_writes_what_is_served(
    tmp_path: Path, package: dict[str, object], build: Build, expected: bool
) -> None:
    """The command may be the app's own, as in a manifest that `capsule init` has written."""
    (tmp_path / "package.json").write_text(json.dumps(package))
    assert is_built_by_tool(tmp_path, build) is expected
