"""Builds of npm and pip packages from a registry at a private address, with a certificate of its own authority."""

import ensurepip
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.registry import INTEGRITY, FakeRegistry
from tests.support.deployment import Host
from tests.support.sandbox import Room
from workers.builds.build import run_build_command
from workers.builds.registries import Registries
from workers.builds.source import DeployError

NAME = socket.gethostname()  # resolves to an address that is not public
PASSWORD = "correct%20horse"
PACKAGES = {
    "name": "app",
    "version": "1.0.0",
    "dependencies": {"greeting": "1.0.0"},
}
LOCK = {
    "name": "app",
    "version": "1.0.0",
    "lockfileVersion": 3,
    "packages": {"": PACKAGES, "node_modules/greeting": {"version": "1.0.0", "integrity": INTEGRITY}},
}
PIP = "python3 pip.whl/pip install --quiet --target lib greeting"
MINUTE = 60.0


@pytest.fixture
def source(room: Room) -> Path:
    source = room.build / "source"
    source.mkdir(mode=0o700)
    (source / "package.json").write_text(json.dumps(PACKAGES))
    (source / "package-lock.json").write_text(json.dumps(LOCK))
    shutil.copy(next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")), source / "pip.whl")
    for path in (source, *source.iterdir()):
        room.sandbox.give_to_user(path, room.uid)
    return source


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[FakeRegistry]:
    async with FakeRegistry(tmp_path, NAME) as registry:
        yield registry


def registries(address: str, ca_file: str = "") -> Registries:
    return Registries({"npm": [f"{address}/npm"], "pip": [f"{address}/pip"]}, ca_file)


async def run(room: Room, command: str, registries: Registries, variables: Mapping[str, str] = {}) -> None:
    more = {"variables": variables, "registries": registries}
    await run_build_command(room.sandbox, room.uid, room.build, command, None, room.lines.append, **more)


async def test_npm_and_pip_install_from_a_private_registry(room: Room, source: Path, registry: FakeRegistry) -> None:
    address = registry.address.replace("//", f"//builder:{PASSWORD}@")
    command = (
        f"npm ci && node -p 'require(\"greeting\")' && {PIP} && PYTHONPATH=lib python3 -c 'import greeting;"
        " print(greeting.text)'; env; cat $HOME/.npmrc; echo correct horse"
    )
    await run(room, command, registries(address, registry.ca_file))
    assert {"from npm", "from pip"} <= {*room.lines}, room.lines
    log = "\n".join(room.lines)
    assert f"NPM_CONFIG_REGISTRY={registry.address}/npm" in log
    assert f"@{NAME}" not in log
    basic = {exchange.header("authorization") for exchange in registry.exchanges}
    assert len(basic) == 1, registry.exchanges
    for secret in (PASSWORD, "correct horse", str(basic.pop()).removeprefix("Basic ")):
        assert secret not in log.partition("\n")[2], room.lines


@pytest.mark.asyncio(loop_scope="session")
async def test_a_deploy_uses_the_registries_in_the_settings(own: Host, tmp_path: Path) -> None:
    build = {"command": "npm ci && mkdir dist && node -p 'require(\"greeting\")' > dist/index.html"}
    files = {"package.json": json.dumps(PACKAGES), "package-lock.json": json.dumps(LOCK)}
    async with FakeRegistry(tmp_path, NAME) as registry:
        setting = f"npm={registry.address}/npm"
        await own.worker("deploys", GATEWAY_BUILD_REGISTRIES=setting, GATEWAY_CA_FILE=registry.ca_file)
        app = await own.app(build=build)
        deploy = await own.over(await own.publish(app, files))
    assert deploy["state"] == "live", deploy
    assert await own.page(app) == "from npm\n"


async def test_a_build_does_not_reach_a_private_registry_that_is_not_listed(
    room: Room, source: Path, registry: FakeRegistry
) -> None:
    variables = {"NPM_CONFIG_REGISTRY": f"{registry.address}/npm"}
    began = time.monotonic()
    with pytest.raises(DeployError, match=r"^the build command ended with status"):
        await run(room, "npm ci", Registries(ca_file=registry.ca_file), variables)
    assert time.monotonic() - began < MINUTE
    assert f"Network: the name {NAME} has no public address" in room.lines
    assert registry.exchanges == []


async def test_a_redirect_does_not_lead_to_another_private_address(
    room: Room, source: Path, registry: FakeRegistry, tmp_path: Path
) -> None:
    async with FakeRegistry(tmp_path, NAME) as other:
        for target in (other.address, f"https://{registry.host}:{other.port}"):
            registry.redirects = {"/npm/greeting": f"{target}/npm/greeting"}
            with pytest.raises(DeployError, match=r"^the build command ended with status"):
                await run(room, "npm ci", registries(registry.address, registry.ca_file))
            for name in ("home", "tmp"):
                shutil.rmtree(room.build / name)
        assert registry.exchanges
        assert other.connections == 0


@pytest.mark.parametrize(
    ("command", "fault", "reason"),
    [
        (PIP, "it refused the connection", "ended with status"),
        ("npm install", "it does not answer", "could not reach a package registry, which its log names"),
        ("npm ci", "its name can't be looked up", "ended with status"),
    ],
)
async def test_a_registry_that_cannot_be_reached_fails_the_build(
    room: Room, source: Path, command: str, fault: str, reason: str
) -> None:
    """Within a minute. The log names it once. A kernel accepts connections for a listener that answers none."""
    if command == "npm install":  # without a lockfile, npm asks for one package after another
        (source / "package-lock.json").unlink()
        many = {f"greeting-{number}": "1.0.0" for number in range(50)}
        (source / "package.json").write_text(json.dumps({**PACKAGES, "dependencies": many}))
    with socket.create_server((socket.gethostbyname(NAME), 0)) as silent:
        address = f"{NAME}:{silent.getsockname()[1]}"
        if "looked up" in fault:
            address = "registry.invalid:443"
        if "refused" in fault:
            silent.close()
        began = time.monotonic()
        with pytest.raises(DeployError, match=f"^the build command {reason}"):
            await run(room, command, registries(f"https://{address}"))
        assert time.monotonic() - began < MINUTE
        assert room.lines.count(f"Network: could not connect to {address}: {fault}") == 1


def test_variables_name_the_registries_and_the_app_may_replace_them() -> None:
    registries = Registries({"npm": ["http://10.1.2.3:4873"], "pip": ["http://a:b@mirror.example.com/simple"]})
    environment = registries.make_environment("")
    assert environment["NPM_CONFIG_REGISTRY"] == "http://10.1.2.3:4873"
    assert environment["PIP_INDEX_URL"] == "http://a:b@mirror.example.com/simple"
    assert environment["PIP_TRUSTED_HOST"] == "mirror.example.com"
    assert "SSL_CERT_FILE" not in environment
    assert registries.endpoints == [("10.1.2.3", 4873), ("mirror.example.com", 80)]


def test_a_user_without_a_password_is_a_token_of_npm() -> None:
    registries = Registries({"npm": ["https://t0k3n%2F-of-npm@mirror.example.com:8443/npm"]})
    assert registries.npmrc == "//mirror.example.com:8443/npm/:_authToken=t0k3n/-of-npm\n"
    assert registries.make_environment("")["NPM_CONFIG_REGISTRY"] == "https://mirror.example.com:8443/npm"
    assert {"t0k3n/-of-npm", "t0k3n%2F-of-npm"} <= {*registries.secrets}
