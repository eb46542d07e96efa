"""Covers when traces are on, the messages if they cannot be, and their cost while they are off."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import load
from gateway.telemetry import tracing
from gateway.telemetry.tracing import INSTALL
from tests.support.wheel import ROOT

ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Collects the errors logged by a process in which tracing has not started."""
    lines: list[dict[str, Any]] = []

    class Log:
        def error(self, event: str, **fields: Any) -> None:
            lines.append({"event": event, **fields})

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tracing, "logger", Log())
    yield lines
    tracing.stop()


def start(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> bool:
    """Starts tracing. Returns whether traces are on."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    tracing.start("test")
    return tracing.tracer() is not None


@pytest.mark.parametrize(
    ("settings", "is_on"),
    [
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, True),
        ({**ON, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20a,b=c=d, "}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({**ON, "OTEL_SDK_DISABLED": "True"}, False),
        ({**ON, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_on_and_off(monkeypatch: pytest.MonkeyPatch, errors: list[Any], settings: dict[str, str], is_on: bool) -> None:
    assert start(monkeypatch, settings) == is_on
    assert not errors
    tracing.stop()
    assert tracing.tracer() is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "must begin with http"),
        ({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "must be http/protobuf"),
        ({**ON, "OTEL_EXPORTER_OTLP_HEADERS": "authorization: s3cret"}, "must be name=value"),
        ({**ON, "OTEL_BSP_MAX_QUEUE_SIZE": "1"}, "OTEL_* are invalid"),
    ],
)
def test_invalid_settings_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, errors: list[Any], settings: dict[str, str], reason: str
) -> None:
    assert not start(monkeypatch, settings)
    [line] = errors
    assert line["event"] == "traces.off"
    assert reason in line["reason"]
    assert "s3cret" not in str(line)


def test_the_variables_may_be_in_an_env_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"OTEL_TRACES_SAMPLER": "always_off"})
    (tmp_path / ".env").write_text("OTEL_SERVICE_NAME=shop\nOTEL_TRACES_SAMPLER=always_on\nOTHER=x\n")
    load(env_file=str(tmp_path / ".env"))
    assert os.environ == {"OTEL_TRACES_SAMPLER": "always_off", "OTEL_SERVICE_NAME": "shop"}


def test_without_the_packages_the_log_says_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, errors: list[Any]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "gateway.telemetry.otlp", raising=False)
    assert not start(monkeypatch, ON)
    assert errors == [{"event": "traces.off", "reason": "OpenTelemetry is not installed", "action": INSTALL}]
    assert "pip install '.[otel]'" in INSTALL


def test_importing_the_service_reads_no_settings_and_no_optional_package(tmp_path: Path) -> None:
    """These are OpenTelemetry's traces and the MCP SDK. redis-py imports OpenTelemetry's metrics by itself."""
    code = "import sys, gateway.app, workers.__main__; print(*sys.modules)"
    environment = {"PYTHONPATH": str(ROOT), "GATEWAY_REDIS_URL": "nonsense", **ON}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=True)
    modules = done.stdout.decode().split()
    assert "gateway.telemetry.tracing" in modules
    optional = r"opentelemetry\.(sdk\.trace|exporter|proto)\b|google\.protobuf|requests$|gateway\.telemetry\.otlp|mcp$"
    assert not [name for name in modules if re.match(optional, name)]
