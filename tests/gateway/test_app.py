"""The application's factory, and the methods that it reports for each address."""

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


def test_invalid_settings_end_the_start_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn makes the application without `capsule serve`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATEWAY_REDIS_URL", "nonsense")
    monkeypatch.setenv("GATEWAY_DRAIN", "never")
    with pytest.raises(SystemExit) as ended:
        create_app()
    first, *faults = str(ended.value.code).splitlines()
    assert first == "The settings are invalid:"
    assert [line.partition(":")[0] for line in faults] == ["GATEWAY_REDIS_URL", "GATEWAY_DRAIN"]
