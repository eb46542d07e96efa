"""Series exist before their first error: Prometheus sees an increase only if it has seen the zero before it."""

import re
from pathlib import Path

import pytest

from gateway.inference.prices import PRICES
from gateway.telemetry.metrics import Metrics

ALERTS = (Path(__file__).parents[3] / "ops/alerts.yml").read_text()
COUNTED = sorted(set(re.findall(r"increase\((gateway_\w+_total(?:\{[^}]*\})?)", ALERTS)))


@pytest.mark.parametrize("selector", COUNTED)
def test_a_series_that_alerts_is_there_from_the_start(selector: str) -> None:
    name, _, matchers = selector.rstrip("}").partition("{")
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
    samples = [s for metric in Metrics(PRICES).registry.collect() for s in metric.samples if s.name == name]
    assert [s for s in samples if wanted.items() <= s.labels.items()], selector


def test_errors_of_every_model_are_there_from_the_start() -> None:
    samples = [s for metric in Metrics(PRICES).registry.collect() for s in metric.samples]
    models = {s.labels["gen_ai_request_model"] for s in samples if s.name == "gateway_provider_errors_total"}
    assert models == set(PRICES)
