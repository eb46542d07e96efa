"""The workloads, and the goals for their costs."""

from __future__ import annotations

from dataclasses import dataclass

IDLE_STREAMS = 2000


@dataclass(frozen=True)
class Load:
    """The load of one run: all streams open within `ramp_ms`, and recording takes `seconds` after `warmup`.

    `delay_us` is the time between two tokens of a stream.
    """

    tokens: int
    streams: int
    seconds: float
    warmup: float
    delay_us: int = 0
    ramp_ms: int = 0
    real: bool = False  # prose with escapes in larger chunks, instead of short fixed tokens
    drain: bool = True


@dataclass(frozen=True)
class Workload:
    load: Load
    most: int  # maximum requests of the first run; a faster gateway ends the recording early
    unit: str = "token"
    goal: float | None = None  # in multiples of nginx; per stream in KiB
    first_token_goal: float | None = None  # in multiples of nginx
    strangers: bool = False  # every request has a new user and token


WORKLOADS = {
    "A32": Workload(Load(128, 32, 3, 1), 6_000, goal=1.0),
    "A256": Workload(Load(128, 256, 4, 1.5), 7_000, goal=0.85),
    "B500": Workload(Load(64, 500, 4, 2, delay_us=10_000, ramp_ms=640), 7_000, goal=1.3),
    "B50": Workload(Load(64, 50, 4, 2, delay_us=20_000, ramp_ms=1280), 400, goal=1.6, first_token_goal=3),
    "C": Workload(Load(1, 32, 3, 0.7), 9_000, "request", goal=3.0),
    "C-cold": Workload(Load(1, 32, 3, 0.7), 8_000, "request", goal=5.5, strangers=True),
    "A32-real": Workload(Load(128, 32, 3, 1, real=True), 6_000),
    "mem": Workload(
        Load(30, IDLE_STREAMS, 2, 8, delay_us=10_000_000, ramp_ms=2 * IDLE_STREAMS, drain=False),
        IDLE_STREAMS,
        "stream",
        goal=12,
    ),
}
