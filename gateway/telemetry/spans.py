"""A trace while it is recorded: a root span, and below it the stages of the work, one after the other.

Only times and a few attributes are noted; what makes spans of them is elsewhere (`otlp.py`). Nothing in a trace may be
a prompt, an answer, a token, a user, a header or a URL.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Protocol

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


class Trace:
    __slots__ = ("_tracer", "context", "root", "stages")

    def __init__(self, tracer: Tracer, context: object, name: str, kind: Kind, began: float) -> None:
        self._tracer = tracer
        self.context = context  # the tracer's
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

    def fail(self, error: str, *, failed: bool = True) -> None:
        """The present stage ended with this error, and with it the whole."""
        for span in (self.root, *self.stages[-1:]):
            span.set_error(error, failed=failed)

    def finish(self) -> None:
        """Ends the trace, and hands it over."""
        now = self.root.ended = time.perf_counter()
        self._end_stage(now)
        self._tracer.record(self)

    def _end_stage(self, now: float) -> None:
        if self.stages and self.stages[-1].ended is None:
            self.stages[-1].ended = now


class Tracer(Protocol):
    def begin(
        self, name: str, kind: Kind, began: float | None = None, traceparent: bytes | None = None
    ) -> Trace | None:
        """A new trace, or the caller's if there is a valid `traceparent`. None if the sampler leaves it out."""

    def record(self, trace: Trace) -> None:
        """Takes a trace that has ended. Never waits, and never raises an error."""

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
