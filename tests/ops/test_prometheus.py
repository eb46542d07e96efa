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


@pytest.mark.parametrize(
    "check",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]],
)
def test_promtool_finds_no_error(promtool: str, check: list[str]) -> None:
    done = subprocess.run([promtool, *check], cwd=OPS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def list_alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", (OPS / "alerts.yml").read_text())


def test_every_alert_is_tested() -> None:
    tested = re.findall(r"alertname: (\w+)\n\s+exp_alerts:", (OPS / "alerts.test.yml").read_text())
    assert sorted(tested) == sorted(list_alerts())


def test_every_alert_is_in_the_monitoring_guide() -> None:
    guide = (OPS.parent / "docs" / "monitoring.md").read_text()
    alerts = guide.partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", alerts, re.MULTILINE) == list_alerts()


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
