"""record_answer.lua keeps the accounts with a provider's two latest answers."""

from tests.lua.inference.conftest import ANSWERS_KEY, ANSWERS_LIFE, Answers


def test_two_accounts_are_kept(answers: Answers) -> None:
    for second, account in enumerate(("a", "b", "c", "b", "d")):
        answers.record(account, second)
    assert answers.list(5) == {"b", "d"}


def test_the_key_expires_with_its_last_answer(answers: Answers) -> None:
    answers.record("a")
    assert ANSWERS_LIFE - 5_000 < answers.client.pttl(ANSWERS_KEY) <= ANSWERS_LIFE


def test_an_answer_from_the_future_is_removed(answers: Answers) -> None:
    """Otherwise, it would push out those that count."""
    answers.record("a", 60)
    answers.record("b", 61)
    answers.record("c")
    assert answers.client.zrange(ANSWERS_KEY, 0, -1) == [b"c"]
