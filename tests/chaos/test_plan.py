from itertools import islice

from tests.chaos.plan import FAMILIES, plan_steps

KINDS = {kind for kinds in FAMILIES.values() for kind in kinds}


def test_same_seed_makes_the_same_faults_in_the_same_order() -> None:
    assert list(islice(plan_steps(7), 200)) == list(islice(plan_steps(7), 200))
    assert list(islice(plan_steps(7), 20)) != list(islice(plan_steps(8), 20))


def test_plan_has_every_kind_that_is_possible() -> None:
    for without in (set(), {"move slot", "fail over"}):
        steps = islice(plan_steps(7, without=without), 60)
        assert {fault.kind for step in steps for fault in step.faults} == KINDS - without


def test_two_faults_of_a_step_are_of_two_families_and_stop_processes_for_5_to_20_seconds() -> None:
    family_of = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}
    steps = list(islice(plan_steps(7), 300))
    assert {len(step.faults) for step in steps} == {1, 2}
    for step in steps:
        assert len({family_of[fault.kind] for fault in step.faults}) == len(step.faults)
        assert all(5 <= fault.seconds <= 20 for fault in step.faults)
