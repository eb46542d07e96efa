"""Checks that the constants of `capacity.py` hold while the load and the number of processes grow.

    .venv/bin/python bench/ramp.py              # about eight minutes
    .venv/bin/python bench/ramp.py -n 1         # about three minutes

Measures the cost of a token from 32 to 2,000 open streams. All streams together always get 8,000 tokens per second, so
that only their number changes: more tokens per second would arrive together more often and cost less. Also measures the
cost of a token and a request with one, two and four processes. Each process gets the same load, because with less load
it would send less to Redis at a time. All costs are CPU time, so the processes can share a core. Figures are medians.

The exit code is 1 if an answer was wrong, or if `--strict` is given and a cost deviates more than 10 % from the mean of
its row. A busy machine inflates CPU time, so check how much other processes took.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import redis
from callers import APPS, Pace
from rig import Rig, Target, cpu_seconds
from workloads import Load

TOKENS = 64
RATE = 8_000  # tokens per second of all streams together
STREAMS = (32, 128, 500, 2000)
PROCESSES = (1, 2, 4)
RECORDED = 8.0  # seconds
FLAT = 0.1

Measure = Callable[[Rig, Target, Pace], dict[str, float]]


def token_cost(streams: int, processes: int = 1) -> Measure:
    """Returns a measure of µs per token that arrives alone. `streams` and the rate are per process."""

    def measure(rig: Rig, gateway: Target, pace: Pace) -> dict[str, float]:
        lasts = TOKENS * streams / RATE
        delay = int(1e6 * streams / RATE)
        load = Load(TOKENS, streams * processes, RECORDED, lasts + 1, delay_us=delay, ramp_ms=int(1000 * lasts))
        pace.wait_for(int((RECORDED + 2 * lasts + 1) * RATE * processes / TOKENS) + load.streams)
        result = rig.load(gateway, load)
        pace.record(result["sent"])
        cost = float(result["us_ev"]) * (TOKENS + gateway.extra_events) / TOKENS
        return {"cost": cost, "wrong": wrong(result), "others": result["others_pct"]}

    return measure


def request_cost(processes: int) -> Measure:
    """Returns a measure of µs per one-token request, in the gateway and in Redis, with 32 connections per process."""

    def measure(rig: Rig, gateway: Target, pace: Pace) -> dict[str, float]:
        server = int(redis.Redis(port=rig.redis_port).info("server")["process_id"])
        pace.wait_for(9_000)
        before = cpu_seconds(server)
        result = rig.load(gateway, Load(1, 32 * processes, 3, 0.7), limit=6_000)
        pace.record(result["sent"])
        of_redis = 1e6 * (cpu_seconds(server) - before) / result["sent"]
        return {
            "cost": float(result["us_req"]),
            "redis": of_redis,
            "wrong": wrong(result),
            "others": result["others_pct"],
        }

    return measure


def wrong(result: dict[str, Any]) -> int:
    return int(result["bad"] + result["stale"])


class Ramp:
    def __init__(self, runs: int) -> None:
        self.runs, self.wrong, self.steepest = runs, 0, 0.0
        self.cores = os.sched_getaffinity(0)

    def measure(self, processes: int, *measures: Measure) -> list[dict[str, float]]:
        os.sched_setaffinity(0, self.cores)  # the last measurement's rig pinned this process to one core
        command = f"{sys.executable} -m capsule_gateway serve --port {{port}} --workers {processes}"
        with Rig(command) as rig, rig.gateway() as gateway:
            pace = Pace()
            warm = rig.load(gateway, Load(8, 8, 30, 0), limit=2 * processes * APPS)
            pace.record(warm["sent"])
            rounds = [[measure(rig, gateway, pace) for measure in measures] for _ in range(self.runs)]
            print(f"{processes=}: {rounds}", file=sys.stderr, flush=True)
        self.wrong += int(sum(result["wrong"] for results in rounds for result in results))
        return [
            {name: median(results[n][name] for results in rounds) for name in rounds[0][n]}
            for n in range(len(measures))
        ]

    def row(self, what: str, names: list[str], costs: list[float]) -> str:
        deviation = max(abs(cost / mean(costs) - 1) for cost in costs)
        self.steepest = max(self.steepest, deviation)
        cells = ", ".join(f"{name}: {cost:.1f}" for name, cost in zip(names, costs, strict=True))
        return f"| {what} | {cells} | ± {100 * deviation:.0f} % |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--runs", type=int, default=3)
    parser.add_argument("--strict", action="store_true", help="fail if a cost is not flat")
    options = parser.parse_args()
    ramp = Ramp(options.runs)
    by_streams = ramp.measure(1, *(token_cost(streams) for streams in STREAMS))
    by_processes = [ramp.measure(number, request_cost(number), token_cost(500, number)) for number in PROCESSES]
    streams, processes = [f"{n} streams" for n in STREAMS], [f"{n} processes" for n in PROCESSES]
    print("| µs | at | within |\n| --- | --- | --- |")
    print(ramp.row("token", streams, [result["cost"] for result in by_streams]))
    print(ramp.row("token", processes, [token["cost"] for _, token in by_processes]))
    print(ramp.row("request", processes, [request["cost"] for request, _ in by_processes]))
    print(ramp.row("request, of Redis", processes, [request["redis"] for request, _ in by_processes]))
    others = max(result["others"] for results in [by_streams, *by_processes] for result in results)
    print(f"\nOther processes took up to {others:.0f} % of a core; {ramp.wrong} wrong answers.")
    return int(ramp.wrong > 0 or (options.strict and ramp.steepest > FLAT))


if __name__ == "__main__":
    sys.exit(main())
