"""Metrics exist before their first error, and counting in batches gives the same result as one by one.

Prometheus sees an increase only after it has seen the zero.
"""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from gateway.settings.prices import PRICES
from gateway.telemetry.metrics import BATCH_REQUESTS, TTFT_BUCKETS_SECONDS, BulkHistogram, Metrics
from tests.support.counters import request_line

ALERTS = (Path(__file__).parents[3] / "ops/alerts.yml").read_text()
COUNTED = sorted(set(re.findall(r"increase\((gateway_\w+_total(?:\{[^}]*\})?)", ALERTS)))


@pytest.mark.parametrize("selector", COUNTED)
def test_the_series_of_alerts_exist_from_the_start(selector: str) -> None:
    name, _, matchers = selector.rstrip("}").partition("{")
    wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
    samples = [s for metric in Metrics(PRICES, ["one"]).registry.collect() for s in metric.samples if s.name == name]
    assert [s for s in samples if wanted.items() <= s.labels.items()], selector


def test_the_errors_of_every_model_exist_from_the_start() -> None:
    samples = [s for metric in Metrics(PRICES).registry.collect() for s in metric.samples]
    models = {s.labels["gen_ai_request_model"] for s in samples if s.name == "gateway_provider_errors_total"}
    assert models == set(PRICES)


@given(st.lists(st.one_of(st.sampled_from(TTFT_BUCKETS_SECONDS), st.floats(min_value=0, max_value=100)), max_size=20))
@example([])
@example([0.05, 0.05, 30.0, 30.1])  # on a bound, and above all of them
def test_a_batch_of_observations_equals_single_ones(amounts: list[float]) -> None:
    together = BulkHistogram("ttft", "…", buckets=TTFT_BUCKETS_SECONDS, registry=CollectorRegistry())
    together.observe_all(amounts)
    one_by_one = Histogram("ttft", "…", buckets=TTFT_BUCKETS_SECONDS, registry=CollectorRegistry())
    for amount in amounts:
        one_by_one.observe(amount)
    seen, expected = (_values(histogram) for histogram in (together, one_by_one))
    assert seen == pytest.approx(expected)


def _values(histogram: Histogram) -> dict[str, float]:
    samples = [sample for metric in histogram.collect() for sample in metric.samples]
    return {f"{s.name}{s.labels}": s.value for s in samples if not s.name.endswith("_created")}


def test_a_request_counts_once_and_at_the_next_scrape() -> None:
    metrics = Metrics(PRICES)
    answer = request_line(model="gpt", input_tokens=7, output_tokens=3, ttft_ms=120.0)
    for _ in range(BATCH_REQUESTS + 1):  # more than one batch
        metrics.queue_request(answer, admitted=True)
    metrics.queue_request(request_line(status=429, code="USER_RATE_LIMITED"), admitted=False)
    metrics.add_reserved(50)
    metrics.add_settled(20)
    labels = 'gen_ai_request_model="gpt"'
    for _ in range(2):
        scraped = metrics.render().decode()
        for expected in (
            f'gateway_requests_total{{code="",format="native",status="200"}} {BATCH_REQUESTS + 1}.0',
            'gateway_requests_total{code="USER_RATE_LIMITED",format="native",status="429"} 1.0',
            f'gen_ai_server_time_to_first_token_seconds_bucket{{{labels},le="0.1"}} {0.0}',
            f'gen_ai_server_time_to_first_token_seconds_bucket{{{labels},le="0.2"}} {BATCH_REQUESTS + 1}.0',
            f"gen_ai_server_request_duration_seconds_sum{{{labels}}} {(BATCH_REQUESTS + 1) / 2}",
            f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="input"}} {7 * (BATCH_REQUESTS + 1)}.0',
            "gateway_reserved_nano_euro_total 50.0",
            "gateway_settled_nano_euro_total 20.0",
        ):
            assert expected in scraped, expected
