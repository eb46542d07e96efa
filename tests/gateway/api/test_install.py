"""The line that installs the command line, from a running gateway and without another network."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.api.client_wheel import client_wheel
from gateway.api.install import make_script
from tests.fakes import FakeProvider
from tests.support.deployment import Host, hosting, server
from tests.support.gateway_process import Gateway
from tests.support.wheel import link_requirements

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(home: Path, command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a line in a shell whose user has this home, and whose pip installs no requirements."""
    path = f"{home / '.local' / 'bin'}:{os.environ['PATH']}"
    variables = {"PATH": path, "HOME": str(home), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120}
    shell = ["sh", "-c", command]
    return await asyncio.to_thread(subprocess.run, shell, cwd=home, env=variables, input=given, **options)


async def test_an_address_of_the_operator_is_quoted(tmp_path: Path) -> None:
    """It may have any character, and the shell must run none of it."""
    script = make_script("https://api.example.com/$(touch${IFS}ran);'`touch ran`").body.decode()
    done = await run(tmp_path, script.replace("\ninstall\n", '\necho "$service $wheel"\n'))
    assert done.stdout.startswith("https://api.example.com/$(touch${IFS}ran);'`touch ran` https://"), done.stderr
    assert not (tmp_path / "ran").exists()


async def test_part_of_the_script_runs_nothing(gw: Gateway, tmp_path: Path) -> None:
    script = (await gw.http.get("/install.sh")).text
    for end in range(0, len(script) - len("install\n"), 97):
        await run(tmp_path, script[:end])
    assert not list(tmp_path.iterdir())


async def test_another_program_stays(gw: Gateway, tmp_path: Path) -> None:
    programs = tmp_path / ".local" / "bin"
    programs.mkdir(parents=True)
    (programs / "capsule").write_text("mine")
    done = await run(tmp_path, f"curl -fsSL {gw.address}/install.sh | sh")
    assert done.returncode == 1
    assert done.stderr == f"install.sh: {programs}/capsule is another program. Move it away first.\n"
    assert (programs / "capsule").read_text() == "mine"


@pytest_asyncio.fixture(loop_scope="session")
async def host(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    async with hosting(provider, tmp_path_factory.mktemp("service")) as host:
        await host.worker("deploys", "sites")
        yield host


async def test_login_deploy_and_logs(host: Host, tmp_path: Path) -> None:
    """With nothing else than a shell, curl and Python: neither the service nor its packages are there."""
    home, gw = tmp_path / "home", host.gateway
    home.mkdir()
    done = await run(home, f"curl -fsSL {gw.address}/install.sh | sh")
    wheel = home / client_wheel().name
    wheel.write_bytes(client_wheel().content)
    assert not link_requirements(wheel, home / ".local" / "share" / "capsule" / "environment")
    program = home / ".local" / "bin" / "capsule"
    assert done.stdout == f"Installed {program}.\nNext: capsule login --url {gw.address}\n", done.stderr
    assert not done.stderr

    async def capsule(arguments: str, given: str = "") -> str:
        done = await run(home, f"capsule {arguments}", given)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    assert client_wheel().name.split("-")[1] in await capsule("--version")
    help_page = await capsule("--help")
    assert "deploy " in help_page
    assert "Run the service" not in help_page
    refused = await run(home, "capsule serve")
    assert refused.returncode == 2
    assert "'serve' is a command of the service" in refused.stderr
    assert "Logged in" in await capsule(f"login --url {gw.address}", f"{host.account.key}\n")
    app = home / "hello"
    app.mkdir()
    for name, text in server("hello", "console.log('it listens')").items():
        (app / name).write_text(text)
    (app / "capsule.toml").write_text('name = "hello"\n[build]\nstart = "exec node server.js"\n')
    assert "Live at https://hello.apps.localhost" in await capsule("deploy hello")
    assert "it listens" in await capsule("logs hello")
    assert (await capsule("new leaflet --template static")).startswith("Wrote")
    refused = await run(home, "capsule mcp")
    assert refused.returncode == 1
    assert f"curl -fsSL {gw.address}/install.sh | sh -s mcp" in refused.stderr

    # Run again, it updates.
    again = await run(home, f"curl -fsSL {gw.address}/install.sh | sh")
    assert again.returncode == 0, again.stderr
    assert client_wheel().name.split("-")[1] in await capsule("--version")
