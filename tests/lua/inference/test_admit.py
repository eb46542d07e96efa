"""Edge cases of admission that a random walk rarely meets."""

from datetime import date, timedelta
from typing import Any

from gateway.redis.client import Script
from tests.lua.scripts import MINUTE, ON_SERVERS, ON_VALKEY, SECOND, TAG, Scripts, at

NOON = at("2026-11-21T12:00:00")


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


def test_after_a_limit_was_lowered_several_requests_must_leave_first(scripts: Scripts) -> None:
    for second in range(4):
        scripts.set_clock(NOON + second * SECOND)
        scripts.admit(0)
    for limit, leaves in ((4, 0), (3, 1), (2, 2), (1, 3), (0, 3)):
        reply = scripts.admit(0, limits=(limit, limit))
        assert reply.verdict == "app"
        assert reply.app_frees_in == reply.user_frees_in == (leaves - 3) * SECOND + MINUTE


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
