from itertools import islice

from tests.chaos.plan import FAMILIES, plan_steps


def test_same_seed_makes_the_same_faults_in_the_same_order() -> None:
    assert list(islice(plan_steps(7), 200)) == list(islice(plan_steps(7), 200))
    assert list(islice(plan_steps(7), 20)) != list(islice(plan_steps(8), 20))


def test_plan_has_every_kind() -> None:
    kinds = {fault.kind for step in islice(plan_steps(7, without=()), 60) for fault in step.faults}
    assert kinds == {kind for family in FAMILIES.values() for kind in family}


def test_impossible_kinds_are_left_out() -> None:
    kinds = {
        fault.kind for step in islice(plan_steps(7, without=("move slot", "fail over")), 60) for fault in step.faults
    }
    assert kinds == {kind for family in FAMILIES.values() for kind in family} - {"move slot", "fail over"}


def test_two_faults_of_a_step_are_of_two_families() -> None:
    family_of = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}
    pairs = [step.faults for step in islice(plan_steps(7), 300) if len(step.faults) == 2]
    assert pairs
    assert all(family_of[first.kind] != family_of[second.kind] for first, second in pairs)


def test_processes_stop_for_5_to_20_seconds() -> None:
    assert all(5 <= fault.seconds <= 20 for step in islice(plan_steps(7), 300) for fault in step.faults)
