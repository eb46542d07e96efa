"""The wheel holds one typed package, and the service runs from it without the source tree."""

import asyncio
import os
import signal
import subprocess
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway.api import documentation
from gateway.api.client_wheel import client_wheel
from tests.support.dev_process import Run
from tests.support.redis_servers import five_free_ports
from tests.support.wheel import ROOT, build_wheel, find_pythons, install

FOREIGN_MODULE = "raise ImportError('this is another package')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_installs_one_typed_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = wheel.name.split("-")[1]
    assert {name.partition("/")[0] for name in names} == {"capsule_gateway", f"capsule_gateway-{version}.dist-info"}
    assert "capsule_gateway/py.typed" in names
    assert not [name for name in names if "node_modules" in name or "__pycache__" in name]
    templates = [path for path in (ROOT / "capsule" / "template").glob("*/*") if path.is_file()]  # .gitignore too
    assert {f"capsule_gateway/{path.relative_to(ROOT)}" for path in templates} <= {*names}
    assert {f"capsule_gateway/{source}" for source in documentation.sources().values()} <= {*names}
    assert not [name for name in names if name.startswith("capsule_gateway/docs/") and name.endswith((".py", ".png"))]


@pytest.mark.parametrize("python", [pytest.param(path, id=version) for version, path in find_pythons().items()])
async def test_the_service_runs_from_the_wheel(wheel: Path, python: str, tmp_path: Path) -> None:
    """It runs beside other packages with the same module names, with each installed Python."""
    programs = await asyncio.to_thread(install, wheel, tmp_path / "environment", "dev", python)
    [packages] = (tmp_path / "environment").glob("lib/*/site-packages")
    for name in ("gateway", "workers", "lua", "capsule"):
        (packages / f"{name}.py").write_text(FOREIGN_MODULE)
    (packages / "faker").unlink()  # the images leave it out
    folder = tmp_path / "anywhere"
    folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}

    def capsule(*arguments: str, name: str = "capsule", **settings: str) -> tuple[int, str]:
        command, environ = [programs / name, *arguments], {**environment, **settings}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    port = five_free_ports()
    async with run_dev(programs / "capsule", folder, {**environment, "CAPSULE_PORT": str(port)}) as api_key:
        calls = [
            asyncio.to_thread(capsule, "--help"),
            asyncio.to_thread(capsule, "--version", name="capsule-gateway"),
            asyncio.to_thread(capsule, "serve", "--check", "--port", str(port)),
            asyncio.to_thread(capsule, "serve", GATEWAY_STORAGE_URL="s3://bucket/prefix"),
        ]
        help_page, version, ready, refused = await asyncio.gather(*calls)
        assert (help_page[0], "\n  publish " in help_page[1], "deploys" in help_page[1]) == (0, False, True), help_page
        assert version == (0, f"capsule, version {wheel.name.split('-')[1]}\n")
        assert ready == (0, f"http://127.0.0.1:{port}/ready answered 200\n")
        assert refused[0] == 1
        assert "pip install '.[s3]'" in refused[1]
        service = {"CAPSULE_URL": f"http://127.0.0.1:{port}", "CAPSULE_API_KEY": api_key}
        assert (await asyncio.to_thread(capsule, "new", "pages", "--template", "static"))[0] == 0
        done = await asyncio.to_thread(capsule, "deploy", "pages", **service)  # the scripts, the workers, the sandbox
        assert "Live at http://pages.apps.localhost" in done[1]
        assert (await asyncio.to_thread(capsule, "new", "full"))[0] == 0
        assert (folder / "full" / "server.ts").exists()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            page = await http.get(f"http://127.0.0.1:{port + 1}/", headers={"Host": "pages.apps.localhost"})
            assert "pages</title>" in page.text
            assert (await http.get(f"http://127.0.0.1:{port}/dashboard")).is_success
            for address in ("/docs", "/docs/webhooks", "/docs/tour", "/docs/reference", "/docs/search.json"):
                assert (await http.get(f"http://127.0.0.1:{port}{address}")).is_success, address
            script = (await http.get(f"http://127.0.0.1:{port}/install.sh")).text
            assert client_wheel().name in script, "the command line is the same from a clone"


@asynccontextmanager
async def run_dev(capsule: Path, folder: Path, environment: dict[str, str]) -> AsyncIterator[str]:
    """Runs `capsule dev` until the block ends, and checks that it stops cleanly. Yields the API key."""
    process = await asyncio.create_subprocess_exec(
        capsule, "dev", cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    dev = Run(int(environment["CAPSULE_PORT"]), folder, process)
    try:
        await dev.read("Press Ctrl-C to stop.", 150)
        assert not dev.ended, dev.said
        yield dev.api_key
    finally:
        await dev.stop(signal.SIGTERM)
    assert dev.said.endswith("Stopped.\n")
