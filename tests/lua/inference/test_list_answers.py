"""list_answers.lua lists the accounts that had an answer lately."""

from tests.lua.inference.conftest import Answers


def test_an_answer_counts_for_its_time(answers: Answers) -> None:
    answers.record("a")
    answers.record("b", 10)
    assert answers.list(29.999) == {"a", "b"}
    assert answers.list(30) == {"b"}
    assert answers.list(40) == set()


def test_an_answer_from_the_future_does_not_count(answers: Answers) -> None:
    """A switchover may set the time back."""
    answers.record("a", 60)
    assert answers.list() == set()
