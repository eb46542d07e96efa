"""Turns traces on: one per inference request, delivery and deploy, if an OTLP endpoint is set.

A trace notes when its stages begin (`spans.py`). Its spans are built from these times after it has ended, and a thread
sends them (`otlp.py`), so nothing waits for them. If traces are off, `tracer` returns None, a stage costs a call that
does nothing, and neither `otlp.py` nor OpenTelemetry is imported.

Failure policy: traces never stop or delay the service. Without the packages, or with invalid settings, the process
reports that once and runs without traces. Spans that the collector does not accept are lost, and counted in the log.
"""

import os
from collections.abc import Mapping

import structlog

from gateway.telemetry.spans import Tracer

logger = structlog.get_logger()

INSTALL = "run pip install '.[otel]' in the clone"

_tracer: Tracer | None = None


def tracer() -> Tracer | None:
    return _tracer


def start(service: str) -> None:
    """Turns traces on if the variables `OTEL_*` say so. Each process calls it once.

    `service` is the default for the service's name.
    """
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
    except Exception as error:  # invalid variables raise many kinds; a message may repeat a secret
        logger.error("traces.off", reason="the variables OTEL_* are invalid", error=type(error).__name__)


def stop() -> None:
    global _tracer
    if _tracer is not None:
        _tracer.close()
        _tracer = None


def _is_wanted(environ: Mapping[str, str]) -> bool:
    return (
        _otlp(environ, "ENDPOINT") != ""
        and environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
        and environ.get("OTEL_TRACES_EXPORTER", "").strip() in ("", "otlp")
    )


def _find_fault(environ: Mapping[str, str]) -> str:
    if not _otlp(environ, "ENDPOINT").startswith(("http://", "https://")):
        return "OTEL_EXPORTER_OTLP_ENDPOINT must begin with http:// or https://"
    if _otlp(environ, "PROTOCOL") not in ("", "http/protobuf"):
        return "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"
    if any(header.strip() and "=" not in header for header in _otlp(environ, "HEADERS").split(",")):
        return "OTEL_EXPORTER_OTLP_HEADERS must be name=value, separated by commas"
    return ""


def _otlp(environ: Mapping[str, str], name: str) -> str:
    """Returns the variable for traces, or else the one for all signals."""
    return (environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")).strip()
