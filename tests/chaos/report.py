"""The table at the end of a run."""

from __future__ import annotations

from statistics import quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.run import Run


def percentile(values: list[float], percent: int) -> str:
    if not values:
        return ""
    return f"{quantiles(values, n=100, method='inclusive')[percent - 1] if len(values) > 1 else values[0]:.2f} s"


def table(run: Run) -> str:
    checker, population = run.checker, run.population
    rows = [
        ("fault", "times", "recovery p50", "p99"),
        ("---", "---", "---", "---"),
        *(
            (kind, str(count), percentile(run.recoveries[kind], 50), percentile(run.recoveries[kind], 99))
            for kind, count in sorted(run.faults.items())
        ),
        *((kind, f"never: {reason}", "", "") for kind, reason in sorted(run.impossible.items())),
    ]
    every = [took for several in run.recoveries.values() for took in several]
    rows.append(("**all**", str(run.faults.total()), percentile(every, 50), percentile(every, 99)))
    facts = {
        "seed, minutes": f"{run.options.seed}, {run.options.minutes:g}",
        "requests": f"{checker.outcomes.total():,}",
        **{f"answered {outcome}": f"{count:,}" for outcome, count in checker.outcomes.most_common()},
        "paid to the provider, nano-euro": f"{checker.paid_total:,}",
        "settled, nano-euro": f"{getattr(run, 'settled', 0):,}",
        "requests whose cost was known exactly": f"{checker.exact:,}",
        "requests whose cost was known within bounds": f"{checker.blurred:,}",
        "accounts whose spend was known exactly": f"{checker.exact_accounts:,} of {checker.judged_accounts:,}",
        "events accepted, received": f"{len(population.events):,}, {len(checker.received):,}",
        "events that were lost": f"{checker.lost_events:,}",
        "deploys": f"{len(population.deploys):,}",
        "violations": f"{len(checker.violations):,}",
    }
    rows += [("", "", "", ""), *((name, value, "", "") for name, value in facts.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
