"""Requests for samples and redeliveries: they are queued, or refused by the account's window."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lua.deliveries import BODIES, DATA, EVENT_KEYS, LOG, OUTCOMES, STREAM
from tests.lua.scripts import DAY, MINUTE, ON_VALKEY, SECOND, TAG, at, on_test_clock, set_clock

NOON = at("2026-11-21T12:00:00")
WINDOW = f"{TAG}:window:events:acc"
SAMPLE = ("shop", "app.crashed", DATA)


class Requests:
    def __init__(self, client: Any) -> None:
        self.client = client
        set_clock(client, NOON)

    def request(self, event: str = "evt_1", *sample: str, limit: int = 3, **bounds: int) -> tuple[str, int]:
        script = self.client.register_script(on_test_clock("events/request_event", **bounds))
        verdict, wait = script([*EVENT_KEYS, WINDOW], [limit, event, "acc", *sample])
        return verdict.decode(), int(wait)

    def log(self, event: str, *, days_ago: float = 0, number: int = 0, redelivery: str = "") -> None:
        moment = (NOON - int(days_ago * DAY)) // 1000
        fields = {"id": event, "type": "app.crashed", "app": "shop", "at": moment, "outcome": "failed"}
        self.client.xadd(LOG, {**fields, "redelivery": redelivery}, id=f"{moment}-{number + 1}")
        self.client.expire(LOG, 60)
        if not self.client.hsetnx(BODIES, event, DATA):
            self.client.hincrby(BODIES, f"{event}:more", 1)
        self.client.expire(BODIES, 60)

    def queued(self) -> list[dict[str, str]]:
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in self.client.xrange(STREAM)]

    def window(self) -> list[int]:
        return [int(moment) for moment in self.client.lrange(WINDOW, 0, -1)]


@pytest.fixture
def requests(client: Any) -> Requests:
    return Requests(client)


def test_an_event_of_the_log(requests: Requests) -> None:
    requests.log("evt_2", days_ago=2)
    requests.log("evt_1", days_ago=1.5)
    requests.log("evt_2", days_ago=1, redelivery="1")
    assert requests.request("evt_2") == ("queued", 0)
    [event] = requests.queued()
    assert (event["id"], event["app"], event["redelivery"]) == ("evt_2", "shop", "2"), "the newest entry counts"
    assert "sample" not in event
    assert requests.client.hmget(BODIES, "evt_2", "evt_2:more") == [DATA.encode(), b"2"]


def test_an_event_anywhere_in_a_long_log_or_not_in_it(requests: Requests) -> None:
    for number in range(101):
        requests.log(f"evt_{number}", number=number)
    events = [f"evt_{place}" for place in (0, 1, 50, 51, 100)]
    for event in events:
        assert requests.request(event, limit=99) == ("queued", 0)
    assert requests.request("evt_none", limit=99) == ("unknown", 0)
    assert [event["id"] for event in requests.queued()] == events
    assert len(requests.window()) == 6, "a search counts"


def test_an_event_of_more_than_thirty_days_ago(requests: Requests) -> None:
    requests.log("evt_old", days_ago=30.001)
    requests.log("evt_young", days_ago=29.999)
    assert requests.request("evt_old") == ("unknown", 0)
    assert requests.request("evt_young") == ("queued", 0)


def test_where_too_many_wait(requests: Requests) -> None:
    assert requests.request("evt_1", *SAMPLE, MAX_WAITING=1) == ("queued", 0)
    assert requests.request("evt_2", *SAMPLE, MAX_WAITING=1) == ("dropped", 0)
    assert len(requests.queued()) == 1
    assert len(requests.window()) == 2, "what is dropped is written to the log, and counts"
    assert requests.client.xlen(LOG) == 1
    assert requests.client.hgetall(OUTCOMES) == {b"dropped": b"1", b"dropped:overflow": b"1"}


def test_a_clock_that_was_set_back_blocks_nobody_for_longer(requests: Requests) -> None:
    for _ in range(3):
        requests.request("evt_1", *SAMPLE)
    set_clock(requests.client, NOON - 3600 * SECOND)
    assert requests.request("evt_1", *SAMPLE) == ("rate", MINUTE)
    set_clock(requests.client, NOON - 3540 * SECOND)
    assert requests.request("evt_1", *SAMPLE)[0] == "queued"


@ON_VALKEY
@given(steps=st.lists(st.integers(0, 25 * SECOND), max_size=40))
def test_never_more_in_any_minute(client: Any, steps: list[int]) -> None:
    """A request that waits for the returned time passes. The window is asked before the log is searched."""
    client.flushall()
    requests, now, passed = Requests(client), NOON, []
    for step in steps:
        now += step
        set_clock(client, now)
        verdict, wait = requests.request("evt_1", *SAMPLE)
        recent = [moment for moment in passed if moment > now - MINUTE]
        assert verdict == ("queued" if len(recent) < 3 else "rate")
        if verdict == "queued":
            passed.append(now)
        else:
            assert wait == recent[0] + MINUTE - now
            assert requests.request("evt_none") == ("rate", wait)
            set_clock(client, recent[0] + MINUTE - 1)
            assert requests.request("evt_1", *SAMPLE) == ("rate", 1)
