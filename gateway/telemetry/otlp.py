"""Sends traces to an OTLP collector with OpenTelemetry's SDK. The only module that imports it (see `tracing.py`).

The SDK's sampler decides at the start of a trace, so a trace that it drops costs nothing more. The SDK's batch
processor keeps at most OTEL_BSP_MAX_QUEUE_SIZE spans and drops the oldest ones beyond that; its thread encodes and
sends them. The spans are built here, because starting and ending a span through the SDK takes ten times as long.

No global tracer provider is set, because libraries with spans of their own would then send the data they see.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.telemetry.spans import NULL_TRACE, Kind, Span, Trace

logger = structlog.get_logger()

FLUSH_SECONDS = 2.0  # at the end of the process
REPORT_SECONDS = 60.0  # between two log lines about spans that were not sent
PACKAGE = "capsule-gateway"

# Their messages repeat addresses, headers and answers of the collector. `ReportingExporter` reports losses instead.
SILENCED = ("opentelemetry.util.re", "opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "urllib3")

KINDS = {kind: SpanKind[kind.name] for kind in Kind}
EMPTY = Context()
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSET, ERROR = Status(), Status(StatusCode.ERROR)
PROPAGATOR = TraceContextTextMapPropagator()


class RootContext(NamedTuple):
    """The ids of a root span and of its parent."""

    own: SpanContext
    parent: SpanContext | None  # the caller's


class OtlpTracer:
    def __init__(self, service: str, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        self._flush_seconds = flush_seconds
        for name in SILENCED:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        provider = TracerProvider(resource=_describe_process(service), shutdown_on_exit=False)
        self._sampler, self._ids, self._resource = provider.sampler, provider.id_generator, provider.resource
        self._scope = InstrumentationScope(PACKAGE, version(PACKAGE))
        self._processor = BatchSpanProcessor(ReportingExporter(OTLPSpanExporter()))

    def begin(self, name: str, kind: Kind, began: float | None = None, traceparent: bytes | None = None) -> Trace:
        parent, context = None, EMPTY
        if traceparent is not None:
            # Without `tracestate`, which may contain anything.
            context = PROPAGATOR.extract({"traceparent": traceparent.decode("latin-1")}, EMPTY)
            remote = get_current_span(context).get_span_context()
            parent = remote if remote.is_valid else None
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        decision = self._sampler.should_sample(context, trace_id, name, KINDS[kind]).decision
        if decision is not Decision.RECORD_AND_SAMPLE:
            return NULL_TRACE
        return Trace(self, RootContext(self._context(trace_id), parent), name, kind, began or time.perf_counter())

    def record(self, trace: Trace) -> None:
        root = trace.context
        assert isinstance(root, RootContext)
        clock = time.time_ns() - time.perf_counter_ns()
        for stage in trace.stages:
            self._export(stage, self._context(root.own.trace_id), root.own, clock)
        self._export(trace.root, root.own, root.parent, clock)

    def _context(self, trace_id: int) -> SpanContext:
        return SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=SAMPLED)

    def _export(self, span: Span, context: SpanContext, parent: SpanContext | None, clock: int) -> None:
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context,
                parent,
                self._resource,
                span.attributes,
                kind=KINDS[span.kind],
                status=ERROR if span.failed else UNSET,
                start_time=int(span.began * 1e9) + clock,
                end_time=int((span.ended or span.began) * 1e9) + clock,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Sends the remaining spans, for `flush_seconds` at most. The SDK would wait longer for one that hangs."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(self._flush_seconds)


class ReportingExporter(SpanExporter):
    """Counts the spans that the collector did not accept, and logs their number at most once a minute."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        self._report_at = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._report(len(spans))
        return result

    def _report(self, lost: int) -> None:
        self._lost += lost
        now = time.monotonic()
        if now >= self._report_at:
            logger.warning("traces.lost", spans=self._lost, reason="the collector did not accept them")
            self._lost, self._report_at = 0, now + REPORT_SECONDS

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _describe_process(service: str) -> Resource:
    """Returns the resource of this process: the attributes from `OTEL_*`, its version and its process id."""
    given = Resource.create()
    own: dict[str, str | int] = {"service.version": version(PACKAGE), "process.pid": os.getpid()}
    if str(given.attributes["service.name"]).startswith("unknown_service"):
        own["service.name"] = service
    return given.merge(Resource(own))
