"""The application's factory, and the methods that it reports for each address."""

from pathlib import Path

import pytest

from gateway.app import create_app
from gateway.settings import Settings


def test_each_route_has_its_methods() -> None:
    app = create_app(Settings()).litestar
    find = app.state.allowed_methods.find
    for route in app.routes:
        assert find(route.path_format), route.path_format
    for path, methods in {
        "/": ["GET", "HEAD", "OPTIONS"],
        "/account/deliveries/evt_1": ["GET", "OPTIONS"],
        "/account/deliveries/evt_1/": ["GET", "OPTIONS"],
        "/account/deliveries/redeliver": ["OPTIONS", "POST"],  # not those of an id
        "/account/deliveries/evt_1/redeliver": ["OPTIONS", "POST"],
        "/account/deliveries/evt_1/redeliver/more": [],
        "/account/deliveries/evt_1/none": [],
        "/account/members/ada": ["DELETE", "OPTIONS", "PUT"],  # of several routes
        "/other": [],
    }.items():
        assert find(path) == methods, path


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
