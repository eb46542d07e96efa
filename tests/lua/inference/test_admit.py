"""Edge cases of admission that a random walk rarely meets."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from gateway.redis.client import Script
from tests.lua.scripts import MINUTE, ON_SERVERS, ON_VALKEY, SECOND, TAG, Scripts, at

NOON = at("2026-11-21T12:00:00")


@pytest.fixture(autouse=True)
def noon(scripts: Scripts) -> None:
    scripts.set_clock(NOON)


def test_production_reads_the_servers_clock(client: Any) -> None:
    source = Script("inference/admit").source
    keys = [f"{TAG}:{name}" for name in ("window:app:a", "window:user:a:u", "spend:acc", "reservations", "leases")]
    before = datetime.now(UTC).timestamp()
    now = int(client.eval(source, 5, *keys, 30, 20, 0, 1, "r", "acc", 1000, 0, "a")[6])
    assert before - 1 < now / 1000 < datetime.now(UTC).timestamp() + 1


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


def test_after_a_limit_was_lowered_several_requests_must_leave_first(scripts: Scripts) -> None:
    for second in range(4):
        scripts.set_clock(NOON + second * SECOND)
        scripts.admit(0)
    for limit, leaves in ((4, 0), (3, 1), (2, 2), (1, 3), (0, 3)):
        reply = scripts.admit(0, limits=(limit, limit))
        assert reply.verdict == "app"
        assert reply.app_frees_in == reply.user_frees_in == (leaves - 3) * SECOND + MINUTE


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


@ON_VALKEY
def test_every_day_from_1970_to_2100(client: Any) -> None:
    epoch, end = date(1970, 1, 1), (date(2101, 1, 1) - date(1970, 1, 1)).days
    for first in range(0, end, 8000):
        last = min(first + 8000, end) - 1
        expected = [(epoch + timedelta(days=d)).isoformat() for d in range(first, last + 1) for _ in range(2)]
        assert utc_days(client, first, last) == expected
