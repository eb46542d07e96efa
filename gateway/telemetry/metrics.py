"""The metrics that Prometheus scrapes at /metrics. Names follow OpenTelemetry's gen_ai conventions where those exist.

A request is noted when it ends, and counted with others: ten times a second, and before a scrape of this process.
Where many end, that takes a third of the time.
"""

from __future__ import annotations

import collections
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.errors import PROVIDER_FAULT_CODES
from gateway.log import RequestLine

TTFT = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)  # seconds
DURATION = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)  # seconds
WAIT = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)  # seconds
TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 8192, 32768, 131072)
BATCH = 1_000  # requests that are counted together at the latest


class BulkHistogram(Histogram):
    """A histogram that takes many observations at once."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        self._sum.inc(sum(amounts))
        buckets = collections.Counter(bisect_left(self._upper_bounds, amount) for amount in amounts)
        for bucket, observations in buckets.items():
            self._buckets[bucket].inc(observations)


class Metrics:
    def __init__(self, models: Iterable[str] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self._ended: list[tuple[RequestLine, bool]] = []  # requests to be counted, and whether they were admitted
        self._new_reserved = self._new_settled = 0  # nano-euro to be counted
        self.requests = Counter(
            "gateway_requests", "Inference requests", ["format", "status", "code"], registry=registry
        )
        self.open_streams = Gauge(
            "gateway_streams_open",
            "Exchanges with the provider under way",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.ttft = BulkHistogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request to its first token",
            ["gen_ai_request_model"],
            buckets=TTFT,
            registry=registry,
        )
        self.duration = BulkHistogram(
            "gen_ai_server_request_duration_seconds",
            "From the request to its end",
            ["gen_ai_request_model"],
            buckets=DURATION,
            registry=registry,
        )
        self.tokens = BulkHistogram(
            "gen_ai_client_token_usage",
            "Tokens per request, as reported by the provider",
            ["gen_ai_request_model", "gen_ai_token_type"],
            buckets=TOKENS,
            registry=registry,
        )
        self._reserved = Counter("gateway_reserved_nano_euro", "Nano-euro reserved", registry=registry)
        self._settled = Counter("gateway_settled_nano_euro", "Nano-euro settled", registry=registry)
        self.refusals = Counter(
            "gateway_admission_refusals", "Requests over a rate or a cap", ["kind"], registry=registry
        )
        self.settlement_retries = Counter(
            "gateway_settlement_retries", "Settlements written again after a failure", registry=registry
        )
        self.lost_reservations = Counter(
            "gateway_reservations_lost",
            "Settlements whose reservation a failover lost",
            registry=registry,
        )
        self.anomalies = Counter(
            "gateway_usage_anomalies",
            "Answers whose usage was missing, nonsense or above the bound",
            ["kind"],
            registry=registry,
        )
        self.provider_errors = Counter(
            "gateway_provider_errors",
            "Requests that failed at the provider",
            ["code", "gen_ai_request_model"],
            registry=registry,
        )
        self.cap_breaches = Counter(
            "gateway_cap_breaches", "Checks that found an account above its daily cap", registry=registry
        )
        self.provider_wait = Histogram(
            "gateway_provider_wait_seconds",
            "How long requests waited for their turn at the provider",
            buckets=WAIT,
            registry=registry,
        )
        self.dropped_log_lines = Counter(
            "gateway_log_lines_dropped", "Log lines dropped because nobody read them", registry=registry
        )
        self.unlogged_requests = Counter(
            "gateway_request_log_dropped",
            "Requests that may be missing from accounts' request logs",
            registry=registry,
        )
        self.connections_ended = Counter(
            "gateway_connections_ended", "Client connections that the server ended", ["reason"], registry=registry
        )
        # Background tasks set these gauges, so that a scrape waits for nothing.
        self.provider_permits = self._gauge(
            "gateway_provider_permits", "The bound in force: requests at the provider at once"
        )
        self.provider_permits_used = self._gauge(
            "gateway_provider_permits_used", "Requests at the provider", mode="livesum"
        )
        self.provider_waiting = self._gauge(
            "gateway_provider_waiting", "Requests that wait for their turn at the provider", mode="livesum"
        )
        self.provider_up = self._gauge("gateway_provider_up", "Whether the provider answers and accepts the credential")
        self.available = self._gauge("gateway_inference_available", "Whether inference is on, approved and configured")
        self.redis_up = self._gauge("gateway_redis_up", "Whether Redis answers and takes writes", mode="livemin")
        self.webhook_queue = self._gauge("gateway_webhook_queue_events", "Events that wait for their outcome")
        self.webhook_oldest = self._gauge("gateway_webhook_queue_oldest_seconds", "Age of the oldest of them")
        self.deploy_queue = self._gauge("gateway_deploy_queue_deploys", "Deploys that wait or are under way")
        self.deploy_oldest = self._gauge("gateway_deploy_queue_oldest_seconds", "Age of the oldest of them")
        self.dead_letters = self._gauge("gateway_dead_letters", "Events and deploys that no worker could process")
        self.deliveries = self._gauge("gateway_deliveries", "Deliveries of events that ended", ["outcome"])
        self.deploys_ended = self._gauge("gateway_deploys_ended", "Deploys that ended", ["state"])
        self.apps_unhealthy = self._gauge("gateway_apps_unhealthy", "Apps that do not answer the uptime probes")
        self.certificates_expiring = self._gauge(
            "gateway_certificates_expiring", "Custom domains whose certificate ends within seven days"
        )
        self.workers = self._gauge("gateway_workers", "Workers with a heartbeat", ["group"])
        # Prometheus sees an increase only if it has seen the zero before it: these alert, so they exist from the start.
        for kind in ("no usage", "above bound"):
            self.anomalies.labels(kind)
        for kind in ("app", "user", "cap"):
            self.refusals.labels(kind)
        for code in PROVIDER_FAULT_CODES:
            for model in models:
                self.provider_errors.labels(code, model)
        for format in ("", "native", "openai"):
            self.requests.labels(format, 500, "INTERNAL")

    def _gauge(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        mode: Literal["livemin", "livesum", "livemostrecent"] = "livemostrecent",
    ) -> Gauge:
        return Gauge(name, help, labels, registry=self.registry, multiprocess_mode=mode)

    def reserved(self, nano_euro: int) -> None:
        self._new_reserved += nano_euro

    def settled(self, nano_euro: int) -> None:
        self._new_settled += nano_euro

    def ended(self, request: RequestLine, *, admitted: bool) -> None:
        """Notes a request that ended."""
        self._ended.append((request, admitted))
        if len(self._ended) >= BATCH:
            self.count()

    def count(self) -> None:
        """Counts what was noted since the last time."""
        self._reserved.inc(self._new_reserved)
        self._settled.inc(self._new_settled)
        self._new_reserved = self._new_settled = 0
        ended, self._ended = self._ended, []
        outcomes = collections.Counter((request.format, request.status, request.code) for request, _ in ended)
        for outcome, requests in outcomes.items():
            self.requests.labels(*outcome).inc(requests)
        admitted: dict[str, list[RequestLine]] = {}
        for request, was_admitted in ended:
            if was_admitted:
                admitted.setdefault(request.model, []).append(request)
        for model, of_model in admitted.items():
            self._observe(model, of_model)

    def _observe(self, model: str, requests: Sequence[RequestLine]) -> None:
        self.duration.labels(model).observe_all([request.duration_ms / 1000 for request in requests])
        self.ttft.labels(model).observe_all([r.ttft_ms / 1000 for r in requests if r.ttft_ms is not None])
        inputs, outputs = self.tokens.labels(model, "input"), self.tokens.labels(model, "output")
        inputs.observe_all([r.input_tokens for r in requests if r.input_tokens is not None])
        outputs.observe_all([r.output_tokens for r in requests if r.output_tokens is not None])

    def refused(self, kind: str) -> None:
        self.refusals.labels(kind).inc()

    def ended_connections(self, reason: str, number: int) -> None:
        self.connections_ended.labels(reason).inc(number)

    def render(self) -> bytes:
        self.count()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # several processes of one gateway: the sum over them
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self.registry)
