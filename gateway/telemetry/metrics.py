"""The metrics that Prometheus scrapes at /metrics. Names follow OpenTelemetry's gen_ai conventions where those exist.

A request is queued when it ends. Ten times a second, and before a scrape of this process, all queued requests are
counted together, which takes a third of the time under load.
"""

import collections
import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gateway.errors import PROVIDER_FAULT_CODES
from gateway.log import RequestLine

TTFT_BUCKETS_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
DURATION_BUCKETS_SECONDS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
WAIT_BUCKETS_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TOKEN_BUCKETS = (1, 16, 64, 256, 512, 1024, 2048, 8192, 32768, 131072)
BATCH_REQUESTS = 1_000  # that are counted together at most


class BulkHistogram(Histogram):
    """A histogram that takes many observations at once."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        self._sum.inc(sum(amounts))
        buckets = collections.Counter(map(partial(bisect_left, self._upper_bounds), amounts))
        for bucket, observations in buckets.items():
            self._buckets[bucket].inc(observations)


class KnownValues(Collector):
    """The metrics without the gauges that are NaN: of several processes, prometheus_client cannot remove them."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.samples = [sample for sample in metric.samples if not math.isnan(sample.value)]
            yield metric


class PermitGauges(NamedTuple):
    in_force: Gauge
    used: Gauge
    waiting: Gauge


class Metrics:
    def __init__(self, models: Iterable[str] = (), providers: Iterable[str] = (), formats: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self._ended: list[tuple[RequestLine, bool]] = []  # queued requests, and whether they were admitted
        self._new_reserved = self._new_settled = 0  # nano-euro, not yet counted
        self._new_attempts: collections.Counter[tuple[str, str]] = collections.Counter()
        counter = partial(Counter, registry=self.registry)
        self.requests = counter("gateway_requests", "Inference requests", ["format", "status", "code"])
        self._reserved = counter("gateway_reserved_nano_euro", "Nano-euro reserved")
        self._settled = counter("gateway_settled_nano_euro", "Nano-euro settled")
        self.refusals = counter(
            "gateway_admission_refusals", "Requests refused by a rate limit or a spending cap", ["kind"]
        )
        self.settlement_retries = counter("gateway_settlement_retries", "Settlements repeated after a failure")
        self.lost_reservations = counter("gateway_reservations_lost", "Settlements whose reservation a failover lost")
        self.anomalies = counter(
            "gateway_usage_anomalies",
            "Answers with invalid or inconsistent usage, usage above the reservation, or an unknown finish reason",
            ["kind"],
        )
        self.provider_errors = counter(
            "gateway_provider_errors", "Requests that failed at the provider", ["code", "gen_ai_request_model"]
        )
        self._attempts = counter(
            "gateway_provider_attempts",
            "Requests sent to a provider, by `ok` or their error code",
            ["provider", "outcome"],
        )
        self.provider_failovers = counter(
            "gateway_provider_failovers",
            "Requests that failed at this provider and went to another",
            ["provider", "code"],
        )
        self.cap_breaches = counter("gateway_cap_breaches", "Checks that found an account above its daily cap")
        self.dropped_log_lines = counter(
            "gateway_log_lines_dropped", "Log lines dropped because the reader of the log was too slow"
        )
        self.unlogged_requests = counter(
            "gateway_request_log_dropped", "Requests that may be missing from accounts' request logs"
        )
        self.connections_ended = counter(
            "gateway_connections_ended", "Client connections that the server closed", ["reason"]
        )
        histogram = partial(BulkHistogram, registry=self.registry)
        self.ttft = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from the request to its first token",
            ["gen_ai_request_model"],
            buckets=TTFT_BUCKETS_SECONDS,
        )
        self.duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from the request to its end",
            ["gen_ai_request_model"],
            buckets=DURATION_BUCKETS_SECONDS,
        )
        self.tokens = histogram(
            "gen_ai_client_token_usage",
            "Tokens per request, as reported by the provider",
            ["gen_ai_request_model", "gen_ai_token_type"],
            buckets=TOKEN_BUCKETS,
        )
        self.provider_wait = histogram(
            "gateway_provider_wait_seconds",
            "Time that requests waited for a permit",
            ["provider"],
            buckets=WAIT_BUCKETS_SECONDS,
        )
        # Background tasks set the gauges, so that a scrape does not wait. Of a state that all processes share, the
        # latest value counts.
        state = partial(Gauge, registry=self.registry, multiprocess_mode="livemostrecent")
        total = partial(Gauge, registry=self.registry, multiprocess_mode="livesum")
        lowest = partial(Gauge, registry=self.registry, multiprocess_mode="livemin")
        self.open_streams = total("gateway_streams_open", "Requests in progress at the provider")
        self.provider_permits = state(
            "gateway_provider_permits", "Limit in force for concurrent requests at the provider", ["provider"]
        )
        self.provider_permits_used = total("gateway_provider_permits_used", "Requests at the provider", ["provider"])
        self.provider_waiting = total("gateway_provider_waiting", "Requests that wait for a permit", ["provider"])
        self.viewers = total("gateway_change_viewers", "Open streams of accounts' changes")
        self.provider_up = state(
            "gateway_provider_up",
            "Whether the provider, if it is enabled, answers, has quota and accepts the credential",
            ["provider"],
        )
        self.available = state("gateway_inference_available", "Whether inference is on, approved and configured")
        self.redis_up = lowest("gateway_redis_up", "Whether Redis answers and takes writes")
        self.clock_skew = state("gateway_clock_skew_seconds", "How far this machine's clock is ahead of Redis's")
        self.webhook_queue = state("gateway_webhook_queue_events", "Events without an outcome yet")
        self.webhook_oldest = state("gateway_webhook_queue_oldest_seconds", "Age of the oldest of these events")
        self.deploy_queue = state("gateway_deploy_queue_deploys", "Deploys that are queued or in progress")
        self.deploy_oldest = state("gateway_deploy_queue_oldest_seconds", "Age of the oldest of these deploys")
        self.dead_letters = state("gateway_dead_letters", "Events and deploys that no worker could process")
        self.deliveries = state("gateway_deliveries", "Finished deliveries of events", ["outcome"])
        self.notices = state("gateway_notices", "Finished notices by e-mail", ["outcome"])
        self.deploys_ended = state("gateway_deploys_ended", "Finished deploys", ["state"])
        self.apps_unhealthy = state("gateway_apps_unhealthy", "Apps that do not answer the uptime probes")
        self.certificates_expiring = state(
            "gateway_certificates_expiring", "Custom domains whose certificate expires within seven days"
        )
        self.workers = state("gateway_workers", "Workers with a heartbeat", ["group"])
        self.worker_starts = state(
            "gateway_worker_starts", "Starts of workers on one host in the last 15 minutes", ["group"]
        )
        self.hosts = state("gateway_hosts", "Hosts that serve apps, or stand by", ["state"])
        self.releases_missing = state("gateway_releases_missing", "Addresses of apps whose release a host lacks")
        self.disk_free = state(
            "gateway_data_disk_free_ratio", "Free share of the data folder's disk, where it is least"
        )
        self.certificate_left = state(
            "gateway_own_certificate_left_ratio", "Share of its lifetime that the service's own certificate has left"
        )
        self.last_backup = state(
            "gateway_backup_last_success_timestamp_seconds", "Time of the last backup, in seconds since the epoch"
        )
        self.last_backup.set(math.nan)  # not 1970, while Redis does not answer
        # Of several processes the latest, so that a restart of any changes it.
        self.started = Gauge(
            "gateway_process_start_time_seconds",
            "When the process that started last did so, in seconds since the epoch",
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.started.set(time.time())
        # Prometheus sees an increase only after it has seen the zero. Alerts use these counters, so they start at zero.
        for kind in ("no usage", "above bound", "token counts", "finish reason"):
            self.anomalies.labels(kind)
        for kind in ("app", "user", "cap"):
            self.refusals.labels(kind)
        self.connections_ended.labels("refused")
        for code in PROVIDER_FAULT_CODES:
            for model in models:
                self.provider_errors.labels(code, model)
        for format in ("", *formats):  # empty while it is unknown
            self.requests.labels(format, 500, "INTERNAL")
        for provider in providers:
            self._attempts.labels(provider, "ok")
            for code in PROVIDER_FAULT_CODES:
                self._attempts.labels(provider, code)
                self.provider_failovers.labels(provider, code)

    def add_reserved(self, nano_euro: int) -> None:
        self._new_reserved += nano_euro

    def add_settled(self, nano_euro: int) -> None:
        self._new_settled += nano_euro

    def count_attempt(self, provider: str, outcome: str) -> None:
        self._new_attempts[provider, outcome] += 1

    def permit_gauges(self, provider: str) -> PermitGauges:
        """Returns the provider's gauges, so that ten settings per second need not look for them."""
        gauges = (self.provider_permits, self.provider_permits_used, self.provider_waiting)
        return PermitGauges(*(gauge.labels(provider) for gauge in gauges))

    def queue_request(self, request: RequestLine, *, admitted: bool) -> None:
        """Queues a request that ended, to be counted."""
        self._ended.append((request, admitted))
        if len(self._ended) >= BATCH_REQUESTS:
            self.count_queued()

    def count_queued(self) -> None:
        """Counts the queued requests."""
        self._reserved.inc(self._new_reserved)
        self._settled.inc(self._new_settled)
        self._new_reserved = self._new_settled = 0
        for attempt, number in self._new_attempts.items():
            self._attempts.labels(*attempt).inc(number)
        self._new_attempts.clear()
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

    def count_ended_connections(self, reason: str, number: int) -> None:
        self.connections_ended.labels(reason).inc(number)

    def render(self) -> bytes:
        self.count_queued()
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # the sum over several processes
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(KnownValues(registry))
