"""The wheel of the command line: what is in it, and that it needs none of the service's packages."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from capsule_gateway.cli.main import SERVICE_TOPIC, TOPICS
from gateway.api.client_wheel import REQUIRED, SERVICE_COMMANDS, client_wheel
from tests.support.wheel import ROOT


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    with zipfile.ZipFile(io.BytesIO(client_wheel().content)) as archive:
        archive.extractall(folder)
    return folder


def test_the_service_is_left_out(unpacked: Path) -> None:
    """What stays are the modules that the commands import, which are few, and the templates."""
    package = unpacked / "capsule_gateway"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    assert {path.name for path in package.iterdir()} == {"__init__.py", "cli", "gateway", "capsule"}
    assert not [name for name in modules if name.startswith(("gateway/api", "gateway/inference", "gateway/redis"))]
    assert {"cli/deploys.py", "cli/source.py", "gateway/deploys/manifest.py"} <= modules
    assert len(client_wheel().content) < 400_000
    templates = {path.relative_to(ROOT) for path in (ROOT / "capsule" / "template").glob("*/*") if path.is_file()}
    assert templates <= {path.relative_to(package) for path in package.rglob("*")}


def test_the_commands_that_it_leaves_out_are_those_of_the_service() -> None:
    assert {*TOPICS[SERVICE_TOPIC].values()} == SERVICE_COMMANDS


def test_its_modules_import_only_what_it_requires(unpacked: Path) -> None:
    """Each module is imported where the other packages of the service are missing."""
    modules = [
        ".".join(path.relative_to(unpacked / "capsule_gateway").with_suffix("").parts).removesuffix(".__init__")
        for path in (unpacked / "capsule_gateway").rglob("*.py")
    ]
    names = [f"capsule_gateway.{name}" if name.startswith("cli") else name for name in modules]
    allowed = {*REQUIRED, "mcp", "pydantic"} - {"python-dotenv"}
    banned = {"redis", "litestar", "structlog", "cryptography", "aiohttp", "prometheus_client", "hiredis"} - allowed
    code = (
        f"import sys, importlib\nsys.modules.update(dict.fromkeys({sorted(banned)!r}))\n"
        "import capsule_gateway\ncapsule_gateway.add_to_path()\n"
        f"for name in {[name for name in names if name not in ('__init__', 'cli.mcp')]!r}:\n"
        "    if name != 'capsule_gateway.cli.mcp': importlib.import_module(name)\n"
        "print(sys.modules['gateway'].__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=unpacked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(unpacked))
