"""Measures the cost of a relayed token, a request and an open stream, compared with nginx and a relay in Rust.

nginx and the relay only pass bytes on. Every workload runs `--runs` times, in turn on each target, and each run gives a
ratio to the run of nginx beside it. The table shows medians. Every second run is in the reverse order, because a target
that is measured after another one appears cheaper. With `--together` they run simultaneously, so that a disturbance of
the machine affects all. The exit code is 1 if an answer or the settled money was wrong, but never because of a
measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from callers import APPS, Pace
from rig import FORMATS, PROMPT, SCRATCH, Rig, Target
from workloads import WORKLOADS, Load, Workload

INPUT_PRICE, OUTPUT_PRICE = 150, 600  # nano-euro per token of the default model
REPORTED_INPUT = 12  # tokens, as reported by the simulated provider
QUIET = 10  # % of one core that other processes may use in a quiet run
ATTEMPTS = 3  # at a quiet run

TARGETS = {
    "nginx": "nginx",
    "rust": "relay in Rust",
    "against": "before",
    "gateway": "gateway",
    "cluster": "on a cluster of three",
    "traces": "with traces of all requests",
    "traces-1%": "with traces of 1 % of the requests",
    "chat": "chat completions",
    "responses": "Responses",
}
DEFAULT = "A32,A256,B500,B50,C,C-cold,mem"


@dataclass
class Ledger:
    """The money that the gateway must settle: the usage of complete answers, and the bound of cut streams."""

    settled: int = 0
    day: str = field(default_factory=lambda: _today())

    def add(self, result: dict[str, Any], tokens: int) -> None:
        bound = (len(PROMPT) + 256) * INPUT_PRICE + tokens * OUTPUT_PRICE
        usage = REPORTED_INPUT * INPUT_PRICE + tokens * OUTPUT_PRICE
        cut = result["sent"] - result["good"] - result["bad"] - result["stale"]
        self.settled += result["good"] * usage + cut * bound

    def check(self, rig: Rig, gateway: Target) -> bool:
        give_up = time.monotonic() + 15
        while (spend := rig.callers.spend(gateway.name, gateway.address)) not in (None, (self.settled, 0)):
            if time.monotonic() > give_up:
                break
            time.sleep(0.2)
        if spend is None or self.day != _today():
            _say("money: not checked")
            return True
        settled, reserved = spend
        verdict = "correct" if settled == self.settled else f"WRONG, expected {self.settled:,}"
        _say(f"money: {settled:,} nano-euro settled, {reserved:,} reserved: {verdict}")
        return settled == self.settled and reserved == 0


class Bench:
    def __init__(self, rig: Rig, names: Iterable[str], runs: int, targets: Sequence[str], together: bool) -> None:
        self.rig, self.names, self.runs, self.targets = rig, list(names), runs, targets
        relays = {"nginx": rig.nginx, "rust": rig.rust}
        self.starts = [relays.get(name) or partial(rig.gateway, name) for name in targets]
        self.results: dict[tuple[str, str], list[dict[str, Any]]] = {}
        gateways = [name for name in targets if name not in relays]
        self.ledgers = {name: Ledger() for name in gateways}
        self.paces = {name: Pace() for name in gateways}
        self.together = together
        self.money_agrees = True

    def run(self) -> None:
        busy = [name for name in self.names if WORKLOADS[name].unit != "stream"]
        if busy:
            with ExitStack() as stack:
                targets = [stack.enter_context(start()) for start in self.starts]
                for target in targets:
                    self.warm(target)
                for run in range(self.runs):
                    for name in busy:
                        self.measure_all(name, targets[:: _direction(run)])
                for target in targets:
                    if target.is_gateway:
                        self.money_agrees &= self.ledgers[target.name].check(self.rig, target)
        for name in set(self.names) - set(busy):
            for run in range(self.runs):
                for start in self.starts[:: _direction(run)]:
                    with start() as target:  # a new process, because memory from other work would hide the growth
                        self.warm(target)
                        self.measure(name, target)
                        if target.is_gateway:
                            self.money_agrees &= self.ledgers[target.name].check(self.rig, target)

    def warm(self, target: Target) -> None:
        """Sends one request per caller, so that apps, keys and tokens are cached."""
        self._send(target, Load(8, 8, 30, 0), limit=APPS, most=2 * APPS)

    def measure_all(self, name: str, targets: Sequence[Target]) -> None:
        if self.together:
            start = threading.Barrier(len(targets), timeout=120)
            with ThreadPoolExecutor(len(targets)) as pool:
                list(pool.map(lambda target: self.measure(name, target, start), targets))
        else:
            for target in targets:
                self.measure(name, target)

    def measure(self, name: str, target: Target, start: threading.Barrier | None = None) -> None:
        """Runs the workload and keeps the best attempt. `start` is a barrier that simultaneous measurements wait at."""
        workload, done = WORKLOADS[name], self.results.setdefault((name, target.name), [])
        load = workload.load
        most = int(1.3 * max(run["sent"] for run in done)) + load.streams if done else workload.most
        recorded = load.seconds / (load.seconds + load.warmup)
        limit = int(most * recorded * 0.8) if target.is_gateway else 0  # nginx has no rate limits
        attempts: list[dict[str, Any]] = []
        # A second attempt at `mem` would start with the memory of the first.
        most_attempts = 1 if workload.unit == "stream" or start is not None else ATTEMPTS
        while len(attempts) < most_attempts and not any(_quiet(run) or _errors(run) for run in attempts):
            result = self._send(target, load, limit, most, workload.strangers, start)
            result["cost"] = _cost(workload, target, result)
            with (SCRATCH / "results.jsonl").open("a") as file:
                file.write(json.dumps({"workload": name, **result}) + "\n")
            _say(
                f"{name:8} {target.name:8} {result['cost']:8.1f} {_unit(workload):10}"
                f" {result['rps']:6.0f} requests/s   cpu {result['cpu_pct']} %, others' {result['others_pct']} %"
                f"   first token p50 {result['ttft50']:.1f} p99 {result['ttft99']:.1f} ms"
                f"   errors {_errors(result)} {result['errmsg']}"
            )
            attempts.append(result)
        done.append(min(attempts, key=lambda run: (not _errors(run), run["others_pct"])))

    def _send(
        self,
        target: Target,
        load: Load,
        limit: int,
        most: int,
        strangers: bool = False,
        start: threading.Barrier | None = None,
    ) -> dict[str, Any]:
        rotation = self.rig.callers.fresh_rotation(target.name, most) if strangers and target.is_gateway else None
        if target.is_gateway:
            self.paces[target.name].wait_for(most)
        if start is not None:
            start.wait()
        result = self.rig.load(target, load, rotation, limit)
        if target.is_gateway:
            self.paces[target.name].record(result["sent"])
            self.ledgers[target.name].add(result, load.tokens)
        return result

    def table(self) -> str:
        names = [TARGETS[target] for target in self.targets]
        ratios = [f"gateway × {TARGETS[target]}" for target in self.targets if target != "gateway"]
        head = ["workload", "of", *names, *ratios, "goal", "errors"]
        rows = [self._row(name, WORKLOADS[name]) for name in self.names]
        if "B50" in self.names:
            rows.append(self._first_token_row("B50", WORKLOADS["B50"]))
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))

    def _row(self, name: str, workload: Workload) -> list[str]:
        goal = workload.goal and (
            f"{workload.goal:g} KiB" if workload.unit == "stream" else f"{workload.goal:g} × nginx"
        )
        errors = sum(_errors(run) for target in self.targets for run in self.results[name, target])
        return [name, _unit(workload), *self._figures(name, "cost"), f"≤ {goal}" if goal else "", str(errors)]

    def _first_token_row(self, name: str, workload: Workload) -> list[str]:
        return [
            name,
            "ms to the first token",
            *self._figures(name, "ttft50"),
            f"≤ {workload.first_token_goal:g} × nginx",
            "",
        ]

    def _figures(self, name: str, figure: str) -> list[str]:
        """Returns a cell per target, then one per ratio of the gateway to another target, as median and extremes."""
        costs = [_spread([run[figure] for run in self._counted(name, target)]) for target in self.targets]
        others = [target for target in self.targets if target != "gateway"]
        return costs + [_spread(self._ratios(name, figure, other), digits=2) for other in others]

    def _counted(self, name: str, target: str) -> list[dict[str, Any]]:
        """Returns the quiet runs, because contention changes figures; all runs if simultaneous or if none was quiet."""
        results = self.results[name, target]
        return results if self._simultaneous(name) else list(filter(_quiet, results)) or results

    def _ratios(self, name: str, figure: str, other: str) -> list[float]:
        """Returns the gateway's ratios to another target in the runs where both were quiet; in all runs if none was."""
        pairs = list(zip(self.results[name, "gateway"], self.results[name, other], strict=True))
        quiet = [pair for pair in pairs if all(map(_quiet, pair))]
        counted = pairs if self._simultaneous(name) else quiet or pairs
        return [float(run[figure] / beside[figure]) for run, beside in counted]

    def _simultaneous(self, name: str) -> bool:
        """Returns whether the targets run simultaneously. Memory is measured one target at a time, in new processes."""
        return self.together and WORKLOADS[name].unit != "stream"

    def quiet_runs(self) -> str:
        """Says how many runs were quiet."""
        runs = [run for results in self.results.values() for run in results]
        return f"{sum(map(_quiet, runs))} of {len(runs)} runs were quiet."

    def errors(self) -> int:
        return sum(_errors(result) for runs in self.results.values() for result in runs)


def _direction(run: int) -> int:
    """Returns the step through the targets: forward in even runs, backward in odd ones."""
    return -1 if run % 2 else 1


def _cost(workload: Workload, target: Target, result: dict[str, Any]) -> float:
    """Returns µs per token or request, or KiB per stream."""
    if workload.unit == "stream":
        return float(result["rssmax_kb"] - result["rss0_kb"]) / max(1, result["maxinfl"])
    if workload.unit == "request":
        return float(result["us_req"])
    tokens = workload.load.tokens
    return float(result["us_ev"]) * (tokens + target.extra_events) / tokens


def _unit(workload: Workload) -> str:
    return "KiB/stream" if workload.unit == "stream" else f"µs/{workload.unit}"


def _quiet(result: dict[str, Any]) -> bool:
    return bool(result["others_pct"] <= QUIET)


def _errors(result: dict[str, Any]) -> int:
    return int(result["bad"] + result["stale"])


def _spread(values: Sequence[float], digits: int | None = None) -> str:
    if digits is None:
        digits = 0 if min(values) >= 100 else 1
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def _circumstances(against: str | None) -> str:
    """Says what was measured, when and where."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commits = f"{_describe(None)}, before: {_describe(against)}" if against else _describe(None)
    model = processor[1] if processor else platform.machine()
    return f"{_today()}, {commits}, Python {platform.python_version()}, {os.cpu_count()} cores of {model}"


def _describe(commit: str | None) -> str:
    """Returns the short name of a commit, or of the one that is checked out, with a mark if files have changed."""
    command = ["git", "describe", "--always", "--exclude=*", *([commit] if commit else ["--dirty"])]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--workloads", default=DEFAULT, help=f"comma-separated, from {', '.join(WORKLOADS)}")
    parser.add_argument("-n", "--runs", type=int, default=5, help="runs per workload")
    parser.add_argument("--gateway", metavar="COMMAND", help="command that starts another gateway, with {port} in it")
    parser.add_argument("--cluster", action="store_true", help="also measure the gateway on Redis Cluster, alternating")
    parser.add_argument("--traces", action="store_true", help="also measure traces of all and of 1 %%, alternating")
    parser.add_argument("--formats", action="store_true", help="also measure the other formats, alternating")
    parser.add_argument("--against", metavar="COMMIT", help="also measure another commit's gateway, alternating")
    parser.add_argument("--no-rust", action="store_true", help="leave out the relay in Rust, which comes from PyPI")
    parser.add_argument("--together", action="store_true", help="measure simultaneously instead of alternating")
    options = parser.parse_args()
    names = options.workloads.split(",")
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    targets = ["nginx", *([] if options.no_rust else ["rust"]), *(["against"] if options.against else []), "gateway"]
    targets += [*(["cluster"] if options.cluster else []), *(["traces", "traces-1%"] if options.traces else [])]
    targets += FORMATS if options.formats else []
    circumstances = _circumstances(options.against)
    with Rig(options.gateway, options.cluster, options.against) as rig:
        bench = Bench(rig, names, options.runs, targets, options.together)
        bench.run()
    print(circumstances, bench.table(), bench.quiet_runs(), sep="\n\n")
    return int(bench.errors() > 0 or not bench.money_agrees)


if __name__ == "__main__":
    sys.exit(main())
