"""Prometheus's own tool accepts the configuration and the alerts."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import require

OPS = Path(__file__).parents[2] / "ops"


@pytest.fixture(scope="session")
def promtool() -> str:
    return require("promtool")


def check(promtool: str, *arguments: str) -> None:
    done = subprocess.run([promtool, *arguments], cwd=OPS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_no_error(promtool: str) -> None:
    check(promtool, "check", "config", "prometheus.yml")
    check(promtool, "check", "rules", "alerts.yml")


def test_each_alert_fires_as_it_should(promtool: str) -> None:
    check(promtool, "test", "rules", "alerts.test.yml")


def list_alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", (OPS / "alerts.yml").read_text())


def test_every_alert_is_tested() -> None:
    tested = re.findall(r"alertname: (\w+)\n\s+exp_alerts:", (OPS / "alerts.test.yml").read_text())
    assert sorted(tested) == sorted(list_alerts())


def test_the_runbook_names_alerts_and_events_that_exist() -> None:
    runbook = (OPS.parent / "docs" / "runbook.md").read_text()
    assert set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", runbook)) <= set(list_alerts())
    code = "".join(
        path.read_text() for folder in ("gateway", "workers") for path in OPS.parent.glob(f"{folder}/**/*.py")
    )
    assert [name for name in re.findall(r"`([a-z]+\.[a-z_]+)`", runbook) if f'"{name}"' not in code] == []


def test_alertmanager_knows_the_alerts() -> None:
    names = re.findall(r'alertname =~? "?([\w|]+)', (OPS / "alertmanager.yml").read_text())
    assert names
    assert {name for found in names for name in found.split("|")} <= set(list_alerts())
