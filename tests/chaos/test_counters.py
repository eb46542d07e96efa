from tests.chaos.counters import Answer, Ledger


def judge(*answers: tuple[float, str, int], clean: bool = False) -> list[str]:
    """Judges answers, each with its time, run and count. `clean`: the last one comes after a clean stop."""
    ledger = Ledger("app", lost_seconds=10)
    for number, (at, run, count) in enumerate(answers, 1):
        ledger.record(Answer(count, run), at, clean=clean and number == len(answers))
    return [violation.removeprefix("app: ") for violation in ledger.violations]


def test_a_run_counts_on() -> None:
    assert judge((1, "a", 1), (2, "a", 2), (3, "a", 4)) == [], "an unanswered request was counted"
    assert judge((1, "a", 1), (2, "a", 2), (3, "b", 3), (4, "b", 4)) == []
    assert judge((1, "a", 1), (2, "a", 2), (3, "a", 2)) == ["one run has counted 2, then 2"]


def test_the_last_counts_may_be_lost() -> None:
    assert judge((1, "a", 1), (2, "a", 2), (11, "a", 3), (40, "b", 2), (41, "b", 3)) == []
    assert judge((1, "a", 1), (2, "a", 2), (15, "a", 3), (40, "b", 2)) == ["the counts of 13 s were lost, not 10 s"]


def test_a_clean_stop_loses_nothing() -> None:
    assert judge((1, "a", 1), (2, "a", 2), (3, "b", 3), clean=True) == []
    assert judge((1, "a", 1), (2, "a", 2), (3, "b", 2), clean=True) == [
        "1 counts were lost when its host stopped cleanly"
    ]


def test_an_earlier_run_is_over() -> None:
    assert judge((1, "a", 1), (2, "b", 2), (3, "a", 3)) == ["an earlier run has answered after a later one"]
