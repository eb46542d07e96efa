"""Each check finds the violations that it is for, and accepts correct records."""

from dataclasses import replace

import pytest
from redis.crc import key_slot

from gateway.keys import app_key, partition_tag
from tests.chaos import books
from tests.chaos.books import Disturbance, Ended, Paid, Received
from tests.chaos.load import Answer
from tests.chaos.prompts import PROMPT, is_faithful, make_word, max_cost, piece_sizes

PAID = Paid(1, 12, 20, whole=True, cut=False)
KILL = Disturbance("kill gateway", "gateway-1", 100, 110)
PRIMARY = Disturbance("kill primary", "redis", 100, 110, redis=True, lossy=True)
CLOCK = Disturbance("step clock", "redis", 100, 110, redis=True, clock=True)
RECEIVER = Disturbance("cut receiver", "receiver", 100, 110)
OWN = {key_slot(name.encode()) for name in (partition_tag("acc"), app_key("app"))}
ELSEWHERE = tuple((slot, slot) for slot in range(16_384) if slot not in OWN)[:100]  # slots of other accounts


def answer(ending: str = "done", status: int = 200, code: str = "", *, start: float = 50.0, **fields: object) -> Answer:
    return Answer(1, "acc", "app", 0, 0, True, start, start + 0.1, start + 1, status, code, ending, **fields)  # type: ignore[arg-type]


# -- money ---------------------------------------------------------------------------------------------------


def test_a_spend_out_of_its_bounds_is_seen() -> None:
    least = most = PAID.cost
    assert not books.check_spend("acc", (PAID.cost, 0), least, most)
    for amount in (2 * PAID.cost, PAID.cost + 1):
        assert "more than the most possible" in books.check_spend("acc", (amount, 0), least, most)[0]
    for amount in (0, PAID.cost - 1):
        assert "less than the least possible" in books.check_spend("acc", (amount, 0), least, most)[0]


EXACT, WIDE = (PAID.cost, PAID.cost), (PAID.cost, max_cost())
MEANWHILE = answer(start=105.0)


@pytest.mark.parametrize(
    ("seen", "paid", "faults", "bounds"),
    [
        (answer(), PAID, [], EXACT),
        (answer("refused", 503, "BACKBONE_UNAVAILABLE"), None, [], (0, 0)),
        (answer("left", tokens=3), Paid(1, 12, 5, whole=False, cut=False), [], (max_cost(), max_cost())),
        (answer(start=99.5), PAID, [KILL], WIDE),
        (answer(start=99.5), PAID, [CLOCK], WIDE),
        (MEANWHILE, PAID, [PRIMARY], EXACT),  # settlements are repeated
        (MEANWHILE, PAID, [replace(KILL, target="gateway-2")], EXACT),
        (MEANWHILE, PAID, [replace(KILL, kind="stop gateway")], EXACT),
    ],
    ids=["whole", "refused", "left", "killed", "clock", "lost primary", "another gateway", "only stopped"],
)
def test_what_an_answer_settles(
    seen: Answer, paid: Paid | None, faults: list[Disturbance], bounds: tuple[int, int]
) -> None:
    assert books.compute_settlement_range(seen, paid, faults) == bounds


def test_another_text_than_the_providers_is_seen() -> None:
    (found,) = books.check_answer(answer(faithful=False), [KILL, PRIMARY, CLOCK])
    assert "with another text" in found
    whole = "".join(make_word(7, place) for place in range(sum(piece_sizes(7))))
    assert is_faithful(7, whole, whole=True)
    assert is_faithful(7, whole[:-5], whole=False)
    assert not is_faithful(7, whole[:-5], whole=True)
    for wrong in (whole[1:], whole.replace("7.1 ", ""), whole + make_word(7, 99), make_word(8, 0)):
        assert not is_faithful(7, wrong, whole=False)


def test_account_above_its_cap_is_seen() -> None:
    assert not books.check_cap("acc", "2026-01-01", 60, 40, 100)
    assert books.check_cap("acc", "2026-01-01", 60, 41, 100)
    assert books.check_cap("acc", "2026-01-01", 60, -1, 100)


def test_answer_that_the_provider_never_gave_is_seen() -> None:
    assert books.check_unpaid(answer(), None)
    assert not books.check_unpaid(answer(), PAID)


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [[], [KILL, PRIMARY]], ids=["calm", "faults"])
@pytest.mark.parametrize(
    "wrong",
    [
        answer("refused", 500, "INTERNAL", start=105.0),
        answer("refused", 404, "APP_NOT_FOUND", start=105.0),
        answer("refused", 401, "TOKEN_INVALID", start=105.0),
        answer("refused", 400, "REQUEST_MALFORMED", start=105.0),  # it had a body
    ],
    ids=lambda wrong: wrong.code,
)
def test_answer_that_is_never_right_is_seen(wrong: Answer, faults: list[Disturbance]) -> None:
    assert books.check_answer(wrong, faults)


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (answer("cut", start=105.0), KILL),
        (answer("none", 0, start=105.0), KILL),
        (answer("refused", 503, "BACKBONE_UNAVAILABLE", start=105.0), PRIMARY),
        (answer("refused", 502, "PROVIDER_ERROR", start=105.0), Disturbance("cut provider", "provider", 100, 110)),
        (answer("error", 200, "PROVIDER_ERROR", start=105.0), Disturbance("cut provider", "provider", 100, 110)),
    ],
    ids=["cut", "none", "503", "502", "error"],
)
def test_failure_needs_a_fault_that_explains_it(seen: Answer, fault: Disturbance) -> None:
    assert not books.check_answer(seen, [fault])
    assert books.check_answer(seen, [])
    assert books.check_answer(seen, [RECEIVER])


def test_fault_of_redis_explains_what_fails_in_its_slots_alone() -> None:
    seen = answer("refused", 503, "BACKBONE_UNAVAILABLE", start=105.0)
    assert not books.check_answer(seen, [replace(PRIMARY, slots=tuple((slot, slot) for slot in OWN))])
    assert books.check_answer(seen, [replace(PRIMARY, slots=ELSEWHERE)])


# -- rates ---------------------------------------------------------------------------------------------------


def test_overfull_window_is_seen() -> None:
    steady = [(float(n), n + 0.1) for n in range(200)]  # one per second
    assert not books.check_window("app", steady, 60, [])
    assert books.check_window("app", [*steady, (100.0, 100.1)], 60, [])


def test_request_counts_only_for_windows_that_hold_it_surely() -> None:
    slow = [(float(n), n + 30.0) for n in range(61)]
    assert books.count_fullest_window(slow) == 31


def test_clock_that_jumps_may_double_a_window() -> None:
    twice = [(100 + n / 2, 100 + n / 2) for n in range(100)]
    assert books.check_window("app", twice, 50, [])
    assert not books.check_window("app", twice, 50, [CLOCK])
    assert books.check_window("app", twice, 49, [CLOCK])


def test_forgotten_admissions_do_not_count() -> None:
    burst = [(100.5, 100.6)] * 10
    assert books.check_window("app", burst, 5, [replace(PRIMARY, lossy=False)])
    assert not books.check_window("app", burst, 5, [PRIMARY])
    assert books.check_cap("acc", "day", 2 * max_cost(), 0, max_cost())
    assert not books.check_cap("acc", "day", 2 * max_cost(), 0, max_cost(), forgotten=1)


# -- events and deploys --------------------------------------------------------------------------------------


def check_event(
    at: float | None, *received: float, given_up: bool = False, fault: Disturbance | None = None
) -> list[str]:
    """Checks an event that was accepted at `at`, if at all, and received at these times."""
    accepted = {} if at is None else {"evt": (at, "acc")}
    entries = [Received("acc", "evt", each, True) for each in received]
    return books.check_events(accepted, entries, {"evt"} if given_up else set(), [fault] if fault else [])


def test_event_may_be_lost_only_by_a_takeover_of_its_partition() -> None:
    assert check_event(50.0) == ["event evt was lost"]
    assert not check_event(50.0, 51.0)
    assert not check_event(100.5, fault=PRIMARY)
    for other in (replace(PRIMARY, lossy=False), replace(PRIMARY, slots=ELSEWHERE)):
        assert check_event(100.5, fault=other)


def test_event_may_be_given_up_only_if_its_receiver_failed() -> None:
    assert check_event(105.0, given_up=True) == ["event evt was given up"]
    assert not check_event(105.0, given_up=True, fault=RECEIVER)
    assert check_event(105.0, fault=RECEIVER)


def test_event_that_came_twice_needs_a_fault_that_met_it() -> None:
    worker = Disturbance("kill worker", "webhooks-1", 100, 105)
    for fault in (worker, PRIMARY):
        assert not check_event(None, 101.0, 120.0, fault=fault)
    for fault in (KILL, replace(PRIMARY, slots=ELSEWHERE)):
        assert check_event(None, 101.0, 120.0, fault=fault)
    assert check_event(None, 90.0, 104.0, fault=worker)
    assert check_event(None, 101.0, 101.1, fault=PRIMARY)
    assert not check_event(None, 101.0, 101.1, fault=CLOCK)


def test_wrong_signature_is_seen() -> None:
    assert books.check_events({}, [Received("acc", "evt", 1.0, False)], set(), [])


def check_deploy(ended: Ended | None, events: list[tuple[str, str]], *faults: Disturbance) -> list[str]:
    return books.check_deploy("dep", "acc", ended, 50.0, events, faults)


def test_deploy_ends_once() -> None:
    succeeded, failed = ("evt_1", "deploy.succeeded"), ("evt_2", "deploy.failed")
    live = Ended("live", 50.0, 60.0)
    assert not check_deploy(live, [succeeded, succeeded])
    assert check_deploy(live, [succeeded, ("evt_3", "deploy.succeeded")])
    assert check_deploy(live, [succeeded, failed])
    assert check_deploy(Ended("canary"), [])
    assert check_deploy(None, [])


def test_deploy_fails_only_by_a_fault_that_it_met() -> None:
    events, stopped = [("evt_2", "deploy.failed")], "the worker stopped during the deploy; deploy again"
    builder = Disturbance("kill worker", "deploys-1", 55, 57)
    assert not check_deploy(Ended("failed", 50.0, 60.0, stopped), events, builder)
    assert check_deploy(Ended("failed", 50.0, 60.0, stopped), events)
    assert check_deploy(Ended("failed", 58.5, 60.0, stopped), events, builder)
    assert check_deploy(Ended("failed", 50.0, 60.0, "GET / returned 500"), events, builder)
    redis = Disturbance("kill primary", "redis", 55, 57, redis=True, slots=ELSEWHERE)
    assert check_deploy(Ended("failed", 50.0, 60.0, stopped), events, redis)


# -- secrets -------------------------------------------------------------------------------------------------


def test_traceback_in_a_log_is_seen() -> None:
    assert books.check_log("gateway-1.log", b'{"exception":"Traceback (most recent call last):"}')
    assert not books.check_log("gateway-1.log", b'{"event":"request"}')


def test_secret_in_a_log_is_seen_and_not_quoted() -> None:
    secrets = {"a prompt": PROMPT.encode(), "the provider's key": b"provider-1234"}
    assert not books.check_secrets("gateway-1.log", b'{"event":"request","model":"gpt-oss-120b"}', secrets)
    for line in (
        f'{{"error":"{PROMPT} 000000001"}}'.encode(),
        b"Authorization: Bearer provider-1234",
        b"csk_0123456789abcdefghijABCD",
        b"Bearer%20csk_0123456789abcdefghijABCD",
        b"whsec_0123456789abcdefghij+/==",
        b"POST /hooks/deploy/0123456789abcdefghij0123456789abcdefghij",
    ):
        found = books.check_secrets("gateway-1.log", line, secrets)
        assert len(found) == 1
        assert line.decode() not in found[0]


def test_a_ciphertext_is_no_key() -> None:
    ciphertext = b'{"secret":"gAAAAABrCCUUYLy2qPkNcsk_ENdg6MWPDtcsk_yKf474v5hd9IjimkuNnBts8DlDZ72zbdbrsp2JTNYb=="}'
    assert not books.check_secrets("appendonly.aof.1.incr.aof", ciphertext, {})
