"""Renders the tables at the end of a run."""

from __future__ import annotations

from statistics import quantiles
from typing import TYPE_CHECKING

from tests.chaos.books import Disturbance

if TYPE_CHECKING:
    from tests.chaos.run import Run


def format_percentile(values: list[float], percent: int) -> str:
    if not values:
        return ""
    return f"{quantiles(values, n=100, method='inclusive')[percent - 1] if len(values) > 1 else values[0]:.2f} s"


def _measure_outage(spans: list[tuple[float, float]], fault: Disturbance) -> float:
    """Returns the seconds from the start of the first span to the end of the last, of those that overlap the fault."""
    met = [(begin, end) for begin, end in spans if end >= fault.begin and begin <= fault.end]
    return max(end for _, end in met) - min(begin for begin, _ in met) if met else 0.0


def render_table(run: Run) -> str:
    checker, population = run.checker, run.population
    head = "fault", "times", "Redis away p50", "p99", "callers refused p50", "p99", "recovery p50", "p99"
    rows = [head, ("---",) * len(head)]
    kinds: dict[str, list[Disturbance]] = {kind: [] for kind, count in run.faults.items() if count}
    for fault in run.disturbances:
        kinds[fault.kind].append(fault)
    failures = sorted(checker.failures)
    lengths = {
        kind: [[_measure_outage(spans, fault) for fault in faults] for spans in (run.recovery.outages, failures)]
        for kind, faults in kinds.items()
    }
    for kind in sorted(kinds):
        columns = [*lengths[kind], run.recoveries[kind]]
        row = [format_percentile(column, percent) for column in columns for percent in (50, 99)]
        rows.append((kind, str(run.faults[kind]), *row))
    columns = [
        *([length for of_kind in lengths.values() for length in of_kind[n]] for n in (0, 1)),
        [took for several in run.recoveries.values() for took in several],
    ]
    row = [format_percentile(column, percent) for column in columns for percent in (50, 99)]
    rows.append(("**all**", str(run.faults.total()), *row))
    options = run.options
    facts = {
        "seed, minutes": f"{options.seed}, {options.minutes:g}",
        **{f"never: {kind}": reason for kind, reason in sorted(run.impossible.items())},
        "requests": f"{checker.outcomes.total():,}",
        **{f"answered {outcome}": f"{count:,}" for outcome, count in checker.outcomes.most_common()},
        "paid to the provider, nano-euro": f"{checker.paid_total:,}",
        "settled, nano-euro": f"{getattr(run, 'settled', 0):,}",
        "requests whose cost was known exactly": f"{checker.exact:,}",
        "requests whose cost was known within bounds": f"{checker.blurred:,}",
        "accounts whose spend was known exactly": f"{checker.exact_accounts:,} of {checker.judged_accounts:,}",
        "events accepted, received": f"{len(population.events):,}, {len(checker.received):,}",
        "events that were lost, came more than once": f"{checker.lost_events:,}, {checker.duplicates:,}",
        "deploys": f"{len(population.deploys):,}",
        **{f"deploys failed: {error}": f"{count:,}" for error, count in checker.failed_deploys.most_common()},
        "violations": f"{len(checker.violations):,}",
    }
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]
    return "\n".join(lines)
