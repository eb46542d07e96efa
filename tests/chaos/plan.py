"""Plans the faults of a run from its seed alone, so that a run can be repeated.

A step has one fault, or two of different families at once. The plan chooses the target of a fault as a number ("the
third primary"). The run maps the number to a process when it injects the fault, because a failover changes the roles.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Kinds of faults by the part that they hit.
FAMILIES = {
    "gateway": ("kill gateway", "stop gateway"),
    "worker": ("kill worker", "stop worker"),
    "redis": (
        "kill primary",
        "kill replica",
        "stop primary",
        "fail over",
        "move slot",
        "cut redis",
        "pause redis",
        "fill memory",
        "fill disk",
        "step clock",
    ),
    "network": ("cut provider", "slow provider", "cut receiver", "slow receiver"),
}
WEIGHTS = {"gateway": 2, "worker": 2, "redis": 5, "network": 2}


@dataclass(frozen=True)
class Fault:
    kind: str
    chance: int  # chooses the target among the possible ones
    seconds: float  # until the fault is undone
    size: float  # from -1 to 1, such as the share of the largest clock step


@dataclass(frozen=True)
class Step:
    faults: tuple[Fault, ...]
    pause: float  # seconds between the recovery and the next step


def plan_steps(seed: int, scale: float = 1.0) -> Iterator[Step]:
    """Yields steps without end. `scale`: factor of all durations."""
    chance = random.Random(seed)
    bags: dict[str, list[str]] = {}
    while True:
        count = 2 if chance.random() < 0.3 else 1
        families = [*FAMILIES]
        faults = []
        for _ in range(count):
            family = chance.choices(families, [WEIGHTS[name] for name in families])[0]
            families.remove(family)
            faults.append(
                Fault(
                    _next_kind(bags.setdefault(family, []), FAMILIES[family], chance),
                    chance.randrange(1_000_000),
                    round(chance.uniform(5, 20) * scale, 2),
                    round(chance.uniform(-1, 1), 3),
                )
            )
        yield Step(tuple(faults), round(chance.uniform(3, 8) * scale, 2))


def _next_kind(bag: list[str], kinds: Sequence[str], chance: random.Random) -> str:
    """Draws each kind of a family once before any kind comes again, so that a short run has many kinds."""
    if not bag:
        bag += chance.sample(kinds, len(kinds))
    return bag.pop()
