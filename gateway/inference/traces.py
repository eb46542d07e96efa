"""Describes the spans of a request. Names follow OpenTelemetry's conventions for HTTP servers and generative AI.

A trace holds no content and nothing about the user. Of the caller's headers it holds only `traceparent`. The provider
gets no `traceparent`: it is a third party, and could use it to link the requests of one visitor.
"""

from collections.abc import Collection
from typing import Any

from gateway.errors import Headers
from gateway.inference.formats.completion import finish_reason
from gateway.inference.provider.connection import Stream
from gateway.inference.provider.dialects import TOOL_CALLS
from gateway.inference.request import InferenceRequest
from gateway.telemetry.spans import Kind, Span, Trace, Tracer

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE"})
EXCHANGE, SETTLE = "chat", "settle"


class RequestTraces:
    def __init__(self, tracer: Tracer, routes: Collection[str], models: Collection[str]) -> None:
        """`models` are those that may answer. A provider may name another one."""
        self._tracer, self._routes, self._models = tracer, routes, models

    def begin(self, request: InferenceRequest, headers: Headers) -> Trace:
        parents = [value for name, value in headers if name == b"traceparent"]
        parent = parents[0] if len(parents) == 1 else None
        return self._tracer.begin(_method(request), Kind.SERVER, request.began, parent)

    def finish(self, request: InferenceRequest) -> None:
        trace = request.trace
        if not trace.recorded:
            return
        self._describe_request(request, trace.root)
        if request.code:
            # If the service refused the caller, or the caller left, the service did not fail.
            failed = request.status >= 500 or (request.status == 200 and request.code != "CLIENT_GONE")
            for span in (trace.root, *_failed_stage(trace)):
                span.set_error(request.code, failed=failed)
        last = max((n for n, span in enumerate(trace.stages) if span.kind is Kind.CLIENT), default=-1)
        for n, span in enumerate(trace.stages):
            if span.kind is Kind.CLIENT:
                self._describe_attempt(request, span, is_last=n == last)
            elif span.name == SETTLE:
                span.attributes["capsule.nano_euro"] = request.nano_euro
        trace.finish()

    def _describe_request(self, request: InferenceRequest, root: Span) -> None:
        route = request.path.removeprefix("/capsule/").partition("/")[2]
        root.attributes = {"http.request.method": _method(request), "capsule.request_id": request.request_id}
        if route in self._routes:
            root.attributes["http.route"] = f"/capsule/{{app}}/{route}"
            root.name = f"{root.name} /capsule/{{app}}/{route}"
        if request.status:
            root.attributes["http.response.status_code"] = request.status
        if request.app:
            root.attributes["capsule.app"] = request.app
        if request.account:
            root.attributes["capsule.account"] = request.account

    def _describe_attempt(self, request: InferenceRequest, span: Span, *, is_last: bool) -> None:
        span.name = f"{EXCHANGE} {request.model}"
        span.attributes |= {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.stream": True,  # also if the caller wants the whole answer at once
        }
        if request.stream is not None and is_last:
            _describe_answer(span, request.stream, self._models, request.first_token)


def _method(request: InferenceRequest) -> str:
    return request.method if request.method in METHODS else "_OTHER"


def _failed_stage(trace: Trace) -> list[Span]:
    """Returns the stage in which the request ended: the last one before the settlement, unless the request left it."""
    stages = [span for span in trace.stages if span.name != SETTLE]
    left = len(stages) == len(trace.stages) and bool(stages) and stages[-1].ended is not None
    return [] if left else stages[-1:]


def _describe_answer(span: Span, stream: Stream, models: Collection[str], first_token: float | None) -> None:
    answer = stream.answer
    attributes: dict[str, Any] = {
        "http.response.status_code": stream.status or None,
        "gen_ai.response.model": answer.model if answer.model in models else None,
        "gen_ai.response.finish_reasons": None if answer.finish is None else [finish_reason(answer.finish, TOOL_CALLS)],
        "gen_ai.response.time_to_first_chunk": None if first_token is None else first_token - span.began,
    }
    if (usage := answer.usage) is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.input
        attributes["gen_ai.usage.output_tokens"] = usage.output
    span.attributes |= {name: value for name, value in attributes.items() if value is not None}
