"""Edge cases of admission that a random walk rarely meets."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import MINUTE, ON_SERVERS, SECOND, TAG, Scripts, at

NOON = at("2026-11-21T12:00:00")


@pytest.fixture(autouse=True)
def noon(scripts: Scripts) -> None:
    scripts.set_clock(NOON)


def dump(client: Any) -> dict[bytes, tuple[bytes, int]]:
    return {key: (client.dump(key), client.pttl(key)) for key in client.keys("*")}


def test_the_clock_is_the_tests(scripts: Scripts) -> None:
    scripts.set_clock(at("1999-12-31T23:59:59.999999"))
    reply = scripts.admit()
    assert (reply.day, reply.now) == ("1999-12-31", 946_684_799_999)


def test_production_reads_the_servers_clock(client: Any) -> None:
    source = Script("inference/admit").source
    keys = [f"{TAG}:{name}" for name in ("window:app:a", "window:user:a:u", "spend:acc", "reservations", "leases")]
    before = datetime.now(UTC).timestamp()
    now = int(client.eval(source, 5, *keys, 30, 20, 0, 1, "r", "acc", 1000, 0, "a")[6])
    assert before - 1 < now / 1000 < datetime.now(UTC).timestamp() + 1


def test_a_slot_is_free_after_exactly_sixty_seconds(scripts: Scripts) -> None:
    for n in range(20):
        scripts.set_clock(NOON + n * SECOND)
        assert scripts.admit(reservation=str(n)).verdict == "ok"
    scripts.set_clock(NOON + MINUTE - 1)
    reply = scripts.admit()
    assert (reply.verdict, reply.user_count, reply.user_frees_in) == ("user", 20, 1)
    scripts.set_clock(NOON + MINUTE)
    assert scripts.admit().verdict == "ok"
    reply = scripts.admit()
    assert (reply.verdict, reply.user_frees_in) == ("user", SECOND)


def test_the_first_request_of_an_app_and_of_a_user_takes_a_slot_for_a_minute(scripts: Scripts) -> None:
    reply = scripts.admit()
    assert (reply.app_count, reply.app_frees_in, reply.user_count, reply.user_frees_in) == (1, MINUTE, 1, MINUTE)
    scripts.set_clock(NOON + SECOND)
    reply = scripts.admit(user="ben")
    assert (reply.app_count, reply.app_frees_in, reply.user_count, reply.user_frees_in) == (2, 59 * SECOND, 1, MINUTE)


def test_the_users_of_an_app_share_its_limit(scripts: Scripts) -> None:
    verdicts = [scripts.admit(user=f"u{n}").verdict for n in range(31)]
    assert verdicts == ["ok"] * 30 + ["app"]
    assert scripts.admit(app="other", user="u0").verdict == "ok"


def test_windows_continue_across_minutes_and_days(scripts: Scripts) -> None:
    midnight = at("2026-11-22T00:00:00")
    scripts.set_clock(midnight - 1)
    assert [scripts.admit().verdict for _ in range(21)] == ["ok"] * 20 + ["user"]
    scripts.set_clock(midnight)
    assert scripts.admit().verdict == "user"


def test_the_app_limit_is_checked_before_the_user_limit_and_the_cap_last(scripts: Scripts) -> None:
    assert scripts.admit(1, limits=(1, 1), cap=1).verdict == "ok"
    assert scripts.admit(1, limits=(1, 1), cap=1).verdict == "app"
    assert scripts.admit(1, limits=(2, 1), cap=1).verdict == "user"
    assert scripts.admit(1, limits=(2, 2), cap=1).verdict == "cap"
    scripts.settle("r", 0)


@pytest.mark.parametrize(
    ("limits", "cap", "max_cost"), [((2, 9), 100, 1), ((9, 2), 100, 1), ((9, 9), 20, 1), ((9, 9), 20, 0)]
)
def test_a_refused_request_counts_nowhere(
    client: Any, scripts: Scripts, limits: tuple[int, int], cap: int, max_cost: int
) -> None:
    for n in range(2):
        scripts.admit(10, reservation=f"r{n}", limits=(9, 9), cap=100)
    before = dump(client)
    for n in range(5):
        assert scripts.admit(max_cost, reservation=f"refused-{n}", limits=limits, cap=cap).verdict != "ok"
    after = dump(client)
    assert {k: v[0] for k, v in after.items()} == {k: v[0] for k, v in before.items()}
    assert all(after[k][1] <= before[k][1] for k in before)
    for n in range(2):
        scripts.settle(f"r{n}", -1)


def test_the_cap_to_the_nano_euro(scripts: Scripts) -> None:
    assert scripts.admit(50_000_001, reservation="a", cap=50_000_000).verdict == "cap"
    assert scripts.admit(49_999_999, reservation="b", cap=50_000_000).verdict == "ok"
    assert scripts.admit(2, reservation="c", cap=50_000_000).verdict == "cap"
    # A faulty request only checks whether the cap is full.
    assert scripts.admit(0, reservation="d", cap=50_000_000).verdict == "ok"
    assert scripts.admit(1, reservation="e", cap=50_000_000).verdict == "ok"
    assert scripts.admit(0, reservation="f", cap=50_000_000).verdict == "cap"
    assert scripts.spend("2026-11-21") == (0, 50_000_000)
    assert set(scripts.reservations()) == {"b", "e"}
    assert [scripts.settle(r, -1) for r in "be"] == [49_999_999, 1]
    assert scripts.admit(1, cap=50_000_000).verdict == "cap"


def test_a_clock_that_is_set_back_blocks_a_full_window_for_a_minute_at_most(scripts: Scripts) -> None:
    """No more requests than the limit pass, however far back the clock is set."""
    scripts.set_clock(NOON)
    assert [scripts.admit(limits=(3, 3)).verdict for _ in range(4)] == ["ok"] * 3 + ["app"]
    back = NOON - 3600 * SECOND
    scripts.set_clock(back)
    reply = scripts.admit(limits=(3, 3))
    assert (reply.verdict, reply.app_frees_in) == ("app", MINUTE)
    scripts.set_clock(back + MINUTE - 1)
    assert scripts.admit(limits=(3, 3)).verdict == "app"
    scripts.set_clock(back + MINUTE)
    assert [scripts.admit(limits=(3, 3)).verdict for _ in range(4)] == ["ok"] * 3 + ["app"]


def test_a_refusal_by_the_cap_contains_the_settled_sum(scripts: Scripts) -> None:
    scripts.admit(60, reservation="a", cap=100)
    scripts.admit(30, reservation="b", cap=100)
    scripts.settle("b", 30)
    reply = scripts.admit(20, cap=100)
    assert (reply.verdict, reply.settled) == ("cap", 30)
    scripts.settle("a", 0)


def test_a_reply_contains_the_use_of_each_cap(scripts: Scripts) -> None:
    """Also if a rate refuses the request, before any cap is checked."""
    scripts.admit(60, reservation="a", cap=200, app_cap=100, user_cap=90)
    scripts.settle("a", 50)
    scripts.admit(7, reservation="b", app="other", cap=200)
    reply = scripts.admit(20, reservation="c", cap=200, app_cap=100, user_cap=90)
    assert (reply.verdict, reply.used, reply.app_used, reply.user_used) == ("ok", 57, 50, 50)
    for limits, verdict in (((1, 1), "app"), ((9, 9), "user_cap")):
        reply = scripts.admit(20, reservation="d", limits=limits, cap=200, app_cap=100, user_cap=80)
        assert (reply.verdict, reply.used, reply.app_used, reply.user_used) == (verdict, 77, 70, 70)
    reply = scripts.admit(20, reservation="e", user="ben", cap=200)
    assert (reply.verdict, reply.used, reply.app_used, reply.user_used) == ("ok", 77, 0, 0)
    for reservation in "bce":
        scripts.settle(reservation, 0)


def test_a_call_from_its_deadline_on_reserves_nothing(scripts: Scripts) -> None:
    """From that microsecond on other prices may hold. It is late even if a limit would refuse it too."""
    deadline = NOON // 1000 + 2000
    scripts.set_clock(NOON + 2 * SECOND - 1)
    assert scripts.admit(100, reservation="in time", deadline=deadline).verdict == "ok"
    scripts.set_clock(NOON + 2 * SECOND)
    for limits, cap in (((30, 20), 10**9), ((1, 1), 10**9), ((30, 20), 1)):
        assert scripts.admit(100, reservation="late", deadline=deadline, limits=limits, cap=cap).verdict == "late"
    assert set(scripts.reservations()) == {"in time"}
    assert scripts.admit(0).app_count == 2
    scripts.settle("in time", 0)


def test_large_sums_stay_exact(scripts: Scripts) -> None:
    """With the largest cap, a million euro, a sum formatted as a float would lose its last digits."""
    cap, max_cost = 10**15, 333_333_333_333_333
    for n in range(3):
        assert scripts.admit(max_cost, reservation=f"r{n}", cap=cap).verdict == "ok"
    assert scripts.admit(2, cap=cap).verdict == "cap"
    assert scripts.admit(1, reservation="last", cap=cap).verdict == "ok"
    assert scripts.spend("2026-11-21") == (0, cap)
    assert [scripts.settle(f"r{n}", cost) for n, cost in enumerate([max_cost - 1, -1, max_cost + 1])] == [
        max_cost - 1,
        max_cost,
        max_cost,
    ]
    assert scripts.spend("2026-11-21") == (cap - 2, 1)
    assert scripts.settle("last", 0) == 0


def test_a_cap_of_0_lets_nothing_pass(scripts: Scripts) -> None:
    assert scripts.admit(1, cap=0).verdict == "cap"
    assert scripts.admit(0, cap=0).verdict == "cap"


def test_after_a_limit_was_lowered_the_wait_is_until_the_next_request_can_pass(scripts: Scripts) -> None:
    for n in range(10):
        scripts.set_clock(NOON + n * SECOND)
        scripts.admit(limits=(10, 10))
    reply = scripts.admit(limits=(3, 10))
    # Eight entries have to leave, the eighth one at 12:01:07.
    assert (reply.verdict, reply.app_frees_in) == ("app", 58 * SECOND)
    scripts.set_clock(NOON + 9 * SECOND + 58 * SECOND - 1)
    assert scripts.admit(limits=(3, 10)).verdict == "app"
    scripts.set_clock(NOON + 9 * SECOND + 58 * SECOND)
    assert scripts.admit(limits=(3, 10)).verdict == "ok"


def test_a_reservation_ends_on_the_day_it_was_made(scripts: Scripts) -> None:
    scripts.set_clock(at("2026-12-31T23:59:59.999"))
    assert scripts.admit(700, reservation="late", cap=1000).day == "2026-12-31"
    scripts.set_clock(at("2027-01-01T00:00:00"))
    # The new day has its full cap, whatever the old day still holds.
    assert scripts.admit(1000, reservation="early", cap=1000).verdict == "ok"
    scripts.set_clock(at("2027-01-01T00:04:00"))
    assert scripts.settle("late", 300) == 300
    assert scripts.spend("2026-12-31") == (300, 0)
    assert scripts.spend("2027-01-01") == (0, 1000)
    assert scripts.settle("early", 0) == 0


@ON_SERVERS
def test_a_window_outlives_its_last_request(client: Any) -> None:
    """The key's own expiry never frees a slot before its sixty seconds are over."""
    source = Script("inference/admit").source
    keys = [f"{TAG}:{name}" for name in ("window:app:a", "window:user:a:u", "spend:acc", "reservations", "leases")]
    for _ in range(200):
        client.eval(source, 5, *keys, 10**6, 10**6, 0, 1, "r", "acc", 1000, 0, "a")
        last = int(client.lindex(keys[0], -1))
        ends = client.pexpiretime(keys[0])  # milliseconds; gone once the clock is past it
        assert (ends + 1) * 1000 >= last + MINUTE


def utc_days(client: Any, first: int, last: int) -> list[str]:
    """Returns the date that the script computes for each day's first and last second."""
    source = Script("inference/admit").source
    begin = source.index("local function utc_day(seconds)")
    function = source[begin : source.index("\nend\n", begin) + 5]
    each = "for d = ARGV[1], ARGV[2] do for _, s in ipairs({0, 86399}) do seconds = d * 86400 + s; out[#out + 1] = "
    script = f"local seconds\n{function}\nlocal out = {{}}\n{each} utc_day(seconds) end end return out"
    return [day.decode() for day in client.eval(script, 0, first, last)]


def test_every_day_from_1970_to_2100(client: Any) -> None:
    epoch, end = date(1970, 1, 1), (date(2101, 1, 1) - date(1970, 1, 1)).days
    for first in range(0, end, 8000):
        last = min(first + 8000, end) - 1
        expected = [(epoch + timedelta(days=d)).isoformat() for d in range(first, last + 1) for _ in range(2)]
        assert utc_days(client, first, last) == expected


@pytest.mark.parametrize(
    "moment",
    ["2024-02-29T00:00:00", "2024-02-29T23:59:59.999999", "2000-02-29T12:00:00", "2100-03-01T00:00:00"],
)
def test_leap_days_through_the_whole_script(scripts: Scripts, moment: str) -> None:
    scripts.set_clock(at(moment))
    assert scripts.admit(reservation="r").day == moment[:10]
