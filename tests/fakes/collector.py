"""A collector of traces, which accepts OTLP over HTTP in protobuf."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.fakes.server import Exchange, FakeServer, Script, answer
from tests.support.polling import wait_until

# Makes processes send spans soon after their end.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
HEADER_SECRET = "collector-secret-0f3a9c"


@dataclass
class Span:
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: bool
    began: int
    ended: int
    process: dict[str, Any]

    @property
    def error(self) -> str | None:
        return self.attributes.get("error.type")


class FakeCollector(FakeServer):
    def __init__(self) -> None:
        super().__init__()
        self.plays: Script = answer(200, b"")

    def settings(self, **more: str) -> dict[str, str]:
        headers = f"authorization=Bearer%20{HEADER_SECRET}"
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.address,
            "OTEL_EXPORTER_OTLP_HEADERS": headers,
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            **SOON,
            **more,
        }

    def script(self, exchange: Exchange) -> Script:
        return self.plays

    @property
    def raw(self) -> bytes:
        """Everything that was received, except headers."""
        return b"".join(exchange.path.encode() + exchange.body for exchange in self.exchanges)

    @property
    def spans(self) -> list[Span]:
        return [span for exchange in self.exchanges for span in _decode(exchange)]

    def trace(self, name: str, value: str) -> list[Span]:
        """Returns the trace whose root has this attribute: the root first, then its children in order."""
        for root in self.spans:
            if root.attributes.get(name) == value:
                below = [span for span in self.spans if span.trace == root.trace and span.parent == root.id]
                return [root, *sorted(below, key=lambda span: span.began)]
        return []

    async def wait_for_trace(self, name: str, value: str) -> list[Span]:
        return await wait_until(lambda: self.trace(name, value), 20)


def _decode(exchange: Exchange) -> list[Span]:
    assert exchange.path == "/v1/traces"
    assert exchange.header("authorization") == f"Bearer {HEADER_SECRET}"
    assert exchange.header("content-type") == "application/x-protobuf"
    return [
        Span(
            span.name,
            span.kind,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            _attributes(span.attributes),
            span.status.code == span.status.STATUS_CODE_ERROR,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(resource.resource.attributes),
        )
        for resource in ExportTraceServiceRequest.FromString(exchange.body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: list[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
