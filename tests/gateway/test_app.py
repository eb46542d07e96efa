"""The application's factory, and the methods that it reports for each address."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from litestar import Litestar, delete, get, post

from gateway.app import AllowedMethods, create_app
from gateway.settings import Settings


@get("/")
async def index() -> None: ...


@get("/deploys/{deploy_id:str}")
async def show() -> None: ...


@post("/deploys/{deploy_id:str}/phases")
async def report() -> None: ...


@get("/deploys/queued")
async def queued() -> None: ...


@delete("/deploys/{deploy_id:str}", status_code=204)
async def remove() -> None: ...


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", ["GET", "OPTIONS"]),
        ("/deploys", []),
        ("/deploys/dep_1", ["DELETE", "GET", "OPTIONS"]),
        ("/deploys/dep_1/", ["DELETE", "GET", "OPTIONS"]),
        ("/deploys/queued", ["GET", "OPTIONS"]),
        ("/deploys/dep_1/phases", ["OPTIONS", "POST"]),
        ("/deploys/dep_1/phases/more", []),
        ("/deploys/dep_1/none", []),
        ("/other", []),
    ],
)
def test_allowed_methods(path: str, methods: list[str]) -> None:
    app = Litestar([index, show, report, queued, remove], openapi_config=None)
    assert AllowedMethods(app.routes).find(path) == methods


def test_every_route_has_methods() -> None:
    app = create_app(Settings()).litestar
    for route in app.routes:
        assert app.state.allowed_methods.find(route.path_format), route.path_format


def start(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Starts uvicorn without `capsule serve`."""
    command = [sys.executable, "-m", "uvicorn", "--factory", "gateway.app:create_app", "--port", "0"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), **settings}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_invalid_settings_end_the_start_with_one_message(tmp_path: Path) -> None:
    ended = start(tmp_path, GATEWAY_REDIS_URL="nonsense", GATEWAY_DRAIN="never")
    assert ended.returncode == 1
    lines = ended.stderr.strip().splitlines()
    assert lines[0] == "The settings are invalid:"
    assert [line.partition(":")[0] for line in lines[1:]] == ["GATEWAY_REDIS_URL", "GATEWAY_DRAIN"]
    assert "Traceback" not in ended.stderr


def test_importing_the_application_reads_no_settings(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "GATEWAY_REDIS_URL": "nonsense"}
    subprocess.run([sys.executable, "-c", "import gateway.app"], cwd=tmp_path, env=environment, check=True, timeout=120)
