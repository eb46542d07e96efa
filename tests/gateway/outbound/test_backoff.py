"""The pauses after failed calls to an origin."""

from gateway.outbound.backoff import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Backoff


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_and_end_with_a_success() -> None:
    clock = Clock()
    backoff, pauses = Backoff(clock=clock), []
    for _ in range(5):
        backoff.note_failure(0.01)
        pauses.append(backoff.remaining)
        clock.now += backoff.remaining
        assert backoff.remaining == 0
    assert pauses == [FIRST_PAUSE_SECONDS, 2, 4, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    backoff.note_success()
    backoff.note_failure(0.01)
    assert backoff.remaining == FIRST_PAUSE_SECONDS


def test_an_origin_that_hangs_is_left_alone_as_long_as_it_was_waited_for() -> None:
    backoff = Backoff(clock=Clock())
    backoff.note_failure(3.0)
    assert backoff.remaining == 3.0
    backoff.note_failure(1_000.0)
    assert backoff.remaining == LONGEST_PAUSE_SECONDS


def test_single_failures_are_tolerated() -> None:
    backoff = Backoff(3, Clock())
    for _ in range(2):
        backoff.note_failure(0.01)
        backoff.note_failure(0.01)
        assert backoff.remaining == 0
        backoff.note_success()
    for _ in range(3):
        backoff.note_failure(0.01)
    assert backoff.remaining == FIRST_PAUSE_SECONDS
