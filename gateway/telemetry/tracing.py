"""Traces: one per inference request, delivery and deploy. They are off unless an OTLP endpoint is set.

A piece of work notes when its stages begin. Its spans are made from these times after it has ended, and a thread sends
them, so nothing waits for them. Off, `tracer` returns None: a stage then costs a comparison, and OpenTelemetry's SDK,
which only `otlp.py` uses, is not imported.

Failure policy: traces never stop or delay the service. Without the packages, or with settings that make no sense, the
process reports that once and goes on without them. Spans that the collector does not take are lost, and counted in the
log. Nothing here sees a prompt, an answer, a token, a user, a header or a URL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import structlog

logger = structlog.get_logger()

INSTALL = 'pip install "capsule-gateway[otel]"'

Value = str | int | float | list[str]


class Kind(Enum):
    """As in OpenTelemetry."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    CONSUMER = "consumer"


class Span:
    """A part of a trace. Times are those of `time.perf_counter`."""

    __slots__ = ("attributes", "began", "ended", "failed", "kind", "name")

    def __init__(self, name: str, kind: Kind, began: float) -> None:
        self.name, self.kind, self.began = name, kind, began
        self.ended: float | None = None
        self.failed = False
        self.attributes: dict[str, Value] = {}

    def set_error(self, error: str, *, failed: bool = True) -> None:
        """`error` is a code of the service. It did not fail if the fault was the caller's."""
        self.attributes["error.type"] = error
        self.failed = failed


class Recorder(Protocol):
    """Takes the spans of a trace that has ended. Never waits, and never raises an error."""

    def record(self, trace: Trace) -> None: ...


class Trace:
    """A root span, and below it stages that follow each other."""

    __slots__ = ("_recorder", "context", "root", "stages")

    def __init__(self, recorder: Recorder, context: object, name: str, kind: Kind, began: float) -> None:
        self._recorder = recorder
        self.context = context  # the recorder's
        self.root = Span(name, kind, began)
        self.stages: list[Span] = []

    def enter(self, name: str, kind: Kind = Kind.INTERNAL) -> Span:
        """Begins a stage, and ends the one before."""
        now = time.perf_counter()
        self._end_stage(now)
        stage = Span(name, kind, now)
        self.stages.append(stage)
        return stage

    def leave(self) -> None:
        """Ends the present stage."""
        self._end_stage(time.perf_counter())

    def fail(self, error: str) -> None:
        """The present stage failed, and with it the whole."""
        for span in (self.root, *self.stages[-1:]):
            span.set_error(error)

    def finish(self) -> None:
        """Ends the trace, and hands it over."""
        now = self.root.ended = time.perf_counter()
        self._end_stage(now)
        self._recorder.record(self)

    def _end_stage(self, now: float) -> None:
        if self.stages and self.stages[-1].ended is None:
            self.stages[-1].ended = now


class Tracer(Recorder, Protocol):
    def begin(
        self, name: str, kind: Kind, began: float | None = None, traceparent: bytes | None = None
    ) -> Trace | None:
        """A new trace, or the caller's if there is a valid `traceparent`. None if the sampler leaves it out."""

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""


# -- of this process -----------------------------------------------------------------------------------------

_tracer: Tracer | None = None


def tracer() -> Tracer | None:
    return _tracer


def start(service: str) -> None:
    """Reads the variables `OTEL_*`, as each process does once. `service` is the name unless they give another."""
    global _tracer
    if _tracer is not None or not _is_wanted(os.environ):
        return
    if fault := _find_fault(os.environ):
        logger.error("traces.off", reason=fault)
        return
    try:
        from gateway.telemetry.otlp import OtlpTracer
    except ImportError:
        logger.error("traces.off", reason="OpenTelemetry is not installed", action=INSTALL)
        return
    try:
        _tracer = OtlpTracer(service)
    except Exception as error:  # whatever the libraries make of the variables; the message could repeat a secret
        logger.error("traces.off", reason="the variables OTEL_* are wrong", error=type(error).__name__)


def stop() -> None:
    global _tracer
    if _tracer is not None:
        _tracer.close()
        _tracer = None


def _is_wanted(environ: Mapping[str, str]) -> bool:
    return (
        _endpoint(environ) != ""
        and environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and environ.get("OTEL_TRACES_EXPORTER", "").strip() in ("", "otlp")
    )


def _find_fault(environ: Mapping[str, str]) -> str:
    if not _endpoint(environ).startswith(("http://", "https://")):
        return "OTEL_EXPORTER_OTLP_ENDPOINT must begin with http:// or https://"
    if _otlp(environ, "PROTOCOL") not in ("", "http/protobuf"):
        return "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"
    return ""


def _endpoint(environ: Mapping[str, str]) -> str:
    return _otlp(environ, "ENDPOINT")


def _otlp(environ: Mapping[str, str], name: str) -> str:
    """The variable for traces alone takes precedence over the one for all signals."""
    return (environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")).strip()
