"""Series exist before their first error: Prometheus sees an increase only if it has seen the zero before it.

What is counted together adds up to what would have been counted one by one.
"""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from gateway.inference.spend.prices import PRICES
from gateway.telemetry.metrics import BATCH, TTFT, BulkHistogram, Metrics
from tests.gateway.telemetry.desk import line

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


@given(st.lists(st.one_of(st.sampled_from(TTFT), st.floats(min_value=0, max_value=100)), max_size=20))
@example([])
@example([0.05, 0.05, 30.0, 30.1])  # on a bound, and above all
def test_observations_together_are_those_one_by_one(amounts: list[float]) -> None:
    together = BulkHistogram("ttft", "…", buckets=TTFT, registry=CollectorRegistry())
    together.observe_all(amounts)
    one_by_one = Histogram("ttft", "…", buckets=TTFT, registry=CollectorRegistry())
    for amount in amounts:
        one_by_one.observe(amount)
    seen, expected = (_values(histogram) for histogram in (together, one_by_one))
    assert seen == pytest.approx(expected)


def _values(histogram: Histogram) -> dict[str, float]:
    samples = [sample for metric in histogram.collect() for sample in metric.samples]
    return {f"{s.name}{s.labels}": s.value for s in samples if not s.name.endswith("_created")}


def test_a_request_counts_once_and_at_the_next_scrape() -> None:
    metrics = Metrics(PRICES)
    answer = line(model="gpt", input_tokens=7, output_tokens=3, ttft_ms=120.0)
    for _ in range(BATCH + 1):  # more than are counted together
        metrics.ended(answer, admitted=True)
    metrics.ended(line(status=429, code="USER_RATE_LIMITED"), admitted=False)
    metrics.reserved(50)
    metrics.settled(20)
    labels = 'gen_ai_request_model="gpt"'
    for _ in range(2):
        scraped = metrics.render().decode()
        for expected in (
            f'gateway_requests_total{{code="",format="native",status="200"}} {BATCH + 1}.0',
            'gateway_requests_total{code="USER_RATE_LIMITED",format="native",status="429"} 1.0',
            f'gen_ai_server_time_to_first_token_seconds_bucket{{{labels},le="0.1"}} {0.0}',
            f'gen_ai_server_time_to_first_token_seconds_bucket{{{labels},le="0.2"}} {BATCH + 1}.0',
            f"gen_ai_server_request_duration_seconds_sum{{{labels}}} {(BATCH + 1) / 2}",
            f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="input"}} {7 * (BATCH + 1)}.0',
            "gateway_reserved_nano_euro_total 50.0",
            "gateway_settled_nano_euro_total 20.0",
        ):
            assert expected in scraped, expected
