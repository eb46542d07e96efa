"""The registries of this machine's npm and pip, which `capsule dev` passes on to builds."""

from pathlib import Path

import pytest

from capsule_gateway.dev.registries import find_registries
from gateway.settings import load

NPM = """#!/bin/sh
[ "$*" = "config get registry cafile" ] || exit 1
echo "registry=https://npm.example.com/"
echo "cafile=null"
"""
PIP = """#!/bin/sh
[ "$*" = "config list" ] || exit 1
echo "global.index-url='https://old.example.com/simple'"
cat {options}
"""


async def test_the_addresses_of_npm_and_pip_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "GATEWAY_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GATEWAY_BUILD_REGISTRIES", raising=False)
    (tmp_path / "bin").mkdir()
    (options := tmp_path / "options").touch()
    for name, script in (("npm", NPM), ("pip", PIP.format(options=options))):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert await find_registries(tmp_path) == {
        "GATEWAY_BUILD_REGISTRIES": "npm=https://npm.example.com/,pip=https://old.example.com/simple"
    }
    options.write_text(":env:.index-url='https://user:p%2Cw@new.example.com/simple'\n")
    found = await find_registries(tmp_path)
    assert load(found).build_registries["pip"] == ("https://user:p%2Cw@new.example.com/simple",)
