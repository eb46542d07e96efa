"""A trace while it is recorded: a root span, and below it the stages of the work, one after the other.

A trace notes only times and a few attributes; `otlp.py` turns them into spans. Work that is not traced has the
`NULL_TRACE`, whose methods do nothing: all calls of one request take 0.2 µs together. A trace never holds a prompt, an
answer, a token, a user, a header or a URL.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import ClassVar, Protocol

Value = str | int | float | list[str]


class Kind(Enum):
    """The kinds of spans that OpenTelemetry defines."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    CONSUMER = "consumer"


CLIENT = Kind.CLIENT  # every request names it, and the class would take 0.3 µs to find it


class Span:
    """A part of a trace. Times are those of `time.perf_counter`."""

    __slots__ = ("attributes", "began", "ended", "failed", "kind", "name")

    def __init__(self, name: str, kind: Kind, began: float) -> None:
        self.name, self.kind, self.began = name, kind, began
        self.ended: float | None = None
        self.failed = False
        self.attributes: dict[str, Value] = {}

    def set_error(self, error: str, *, failed: bool = True) -> None:
        """Notes the service's error code. `failed` is False if the fault was the caller's."""
        self.attributes["error.type"] = error
        self.failed = failed


class Trace:
    __slots__ = ("_tracer", "context", "root", "stages")
    recorded: ClassVar[bool] = True

    def __init__(self, tracer: Tracer, context: object, name: str, kind: Kind, began: float) -> None:
        self._tracer = tracer
        self.context = context  # the tracer's
        self.root = Span(name, kind, began)
        self.stages: list[Span] = []

    def enter(self, name: str, kind: Kind = Kind.INTERNAL, attributes: dict[str, Value] | None = None) -> None:
        """Begins a stage, and ends the one before."""
        now = time.perf_counter()
        self._end_stage(now)
        stage = Span(name, kind, now)
        if attributes is not None:
            stage.attributes |= attributes
        self.stages.append(stage)

    def leave(self) -> None:
        """Ends the current stage."""
        self._end_stage(time.perf_counter())

    def describe(self, attributes: dict[str, Value]) -> None:
        """Adds attributes of the work as a whole."""
        self.root.attributes |= attributes

    def fail(self, error: str, *, failed: bool = True) -> None:
        """Notes that the current stage, and with it the work, ended with this error."""
        for span in (self.root, *self.stages[-1:]):
            span.set_error(error, failed=failed)

    def fail_stage(self, error: str) -> None:
        """Notes that the current stage ended with this error; not with ''."""
        if error and self.stages:
            self.stages[-1].set_error(error)

    def finish(self) -> None:
        """Ends the trace, and passes it to the tracer."""
        now = self.root.ended = time.perf_counter()
        self._end_stage(now)
        self._tracer.record(self)

    def _end_stage(self, now: float) -> None:
        if self.stages and self.stages[-1].ended is None:
            self.stages[-1].ended = now


class NullTrace(Trace):
    """The trace of work that is not traced. It has neither a root nor stages."""

    __slots__ = ()
    recorded = False

    def __init__(self) -> None: ...

    def enter(self, name: str, kind: Kind = Kind.INTERNAL, attributes: dict[str, Value] | None = None) -> None: ...

    def leave(self) -> None: ...

    def describe(self, attributes: dict[str, Value]) -> None: ...

    def fail(self, error: str, *, failed: bool = True) -> None: ...

    def fail_stage(self, error: str) -> None: ...

    def finish(self) -> None: ...


NULL_TRACE = NullTrace()


class Tracer(Protocol):
    def begin(self, name: str, kind: Kind, began: float | None = None, traceparent: bytes | None = None) -> Trace:
        """Begins a trace, or continues the caller's if `traceparent` is valid.

        Returns NULL_TRACE if the sampler leaves the trace out.
        """

    def record(self, trace: Trace) -> None:
        """Takes a trace that has ended. Neither waits nor raises an error."""

    def close(self) -> None:
        """Sends the waiting traces, for a few seconds at most."""
