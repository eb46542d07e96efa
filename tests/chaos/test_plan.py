from itertools import islice

from tests.chaos.plan import FAMILIES, steps


def test_same_seed_makes_the_same_faults_in_the_same_order() -> None:
    assert list(islice(steps(7), 200)) == list(islice(steps(7), 200))
    assert list(islice(steps(7), 20)) != list(islice(steps(8), 20))


def test_every_kind_comes() -> None:
    kinds = {fault.kind for step in islice(steps(7, without=()), 60) for fault in step.faults}
    assert kinds == {kind for family in FAMILIES.values() for kind in family}


def test_what_cannot_happen_does_not_come() -> None:
    kinds = {fault.kind for step in islice(steps(7, without=("move slot", "fail over")), 60) for fault in step.faults}
    assert kinds == {kind for family in FAMILIES.values() for kind in family} - {"move slot", "fail over"}


def test_two_faults_at_once_are_of_two_families() -> None:
    family_of = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}
    pairs = [step.faults for step in islice(steps(7), 300) if len(step.faults) == 2]
    assert pairs
    assert all(family_of[first.kind] != family_of[second.kind] for first, second in pairs)


def test_processes_stop_for_5_to_20_seconds() -> None:
    assert all(5 <= fault.seconds <= 20 for step in islice(steps(7), 300) for fault in step.faults)
