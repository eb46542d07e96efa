"""The registries of this machine's npm and pip, which `capsule dev` passes on to builds."""

from pathlib import Path

import pytest

from capsule_gateway.dev.registries import find_registries
from gateway.settings import load
from tests.fakes.receiver import certificate

NPM = """#!/bin/sh
[ "$*" = "config get registry cafile" ] || exit 1
echo "registry=https://npm.example.com/"
echo "cafile={cafile}"
"""
PIP = """#!/bin/sh
case "$*" in
"config list") echo "global.index-url='https://old.example.com/simple'"; cat {options} ;;
*) exit 1 ;;
esac
"""


class Machine:
    """A machine with an npm and a pip of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.options = folder, folder / "options"
        self.options.touch()
        self.install("npm", NPM.format(cafile="null"))
        self.install("pip", PIP.format(options=self.options))

    def install(self, name: str, script: str) -> None:
        program = self.folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(script)
        program.chmod(0o755)

    def certificate(self, name: str) -> str:
        return certificate(self.folder, name)[1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "GATEWAY_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GATEWAY_BUILD_REGISTRIES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return Machine(tmp_path)


async def test_the_addresses_of_npm_and_pip_are_passed_on(machine: Machine, tmp_path: Path) -> None:
    assert await find_registries(tmp_path) == {
        "GATEWAY_BUILD_REGISTRIES": "npm=https://npm.example.com/,pip=https://old.example.com/simple"
    }
    machine.options.write_text(":env:.index-url='https://user:p%2Cw@new.example.com/simple'\n")
    found = await find_registries(tmp_path)
    assert load(found).build_registries["pip"] == ("https://user:p%2Cw@new.example.com/simple",)


async def test_all_authorities_that_the_machine_trusts_are_trusted(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine.certificate("npm.example.com"), machine.certificate("pip.example.com")
    machine.install("npm", NPM.format(cafile=first))
    monkeypatch.setenv("SSL_CERT_FILE", first)
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", str(tmp_path / "missing"))
    assert (await find_registries(tmp_path))["GATEWAY_CA_FILE"] == first
    machine.options.write_text(f"global.cert='{second}'\n")
    merged = Path((await find_registries(tmp_path))["GATEWAY_CA_FILE"])
    assert merged.read_text() == f"{Path(first).read_text()}\n{Path(second).read_text()}"
