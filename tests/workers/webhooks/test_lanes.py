"""The rotation of lanes, the number of concurrent deliveries and the dropped events, without Redis or sockets."""

import itertools

import pytest

from workers.stream import Entry
from workers.webhooks.lanes import LANE_DELIVERIES, LANE_EVENTS, STALLED_SECONDS, Lane, Lanes

_ids = itertools.count()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lanes(clock: Clock) -> Lanes:
    return Lanes(clock)


def entry(account: str) -> Entry:
    return Entry("{p09}", str(next(_ids)), {"account": account})


def add(lanes: Lanes, account: str, count: int = 1) -> list[Entry]:
    entries = [entry(account) for _ in range(count)]
    assert all(lanes.add(each) for each in entries)
    return entries


def take_all(lanes: Lanes) -> list[tuple[Lane, Entry]]:
    return list(iter(lanes.take_entry, None))


def end(lanes: Lanes, lane: Lane, *, timed_out: bool = False) -> None:
    lanes.adapt_lane(lane, timed_out=timed_out)
    lanes.end_delivery(lane)


def test_lanes_rotate_and_keep_their_order(lanes: Lanes) -> None:
    first, second = add(lanes, "a", 3), add(lanes, "b", 2)
    taken = []
    while some := take_all(lanes):
        taken += [found for _, found in some]
        for lane, _ in some:
            lanes.end_delivery(lane)  # without a result, so the number of concurrent deliveries stays the same
    assert taken == [first[0], second[0], first[1], second[1], first[2]]


def test_concurrent_deliveries_double_up_to_a_bound_and_fall_to_one_after_one_timeout(lanes: Lanes) -> None:
    add(lanes, "a", 100)
    sizes = []
    for _ in range(5):
        some = take_all(lanes)
        sizes.append(len(some))
        end(lanes, some[0][0])
        for lane, _ in some[1:]:
            lanes.end_delivery(lane)
    assert sizes == [1, 2, 4, LANE_DELIVERIES, LANE_DELIVERIES]
    some = take_all(lanes)
    end(lanes, some[0][0], timed_out=True)
    for lane, _ in some[1:]:
        lanes.end_delivery(lane)
    assert len(take_all(lanes)) == 1


def test_a_delivery_under_way_keeps_its_lane_and_an_emptied_one_starts_again_with_one(lanes: Lanes) -> None:
    add(lanes, "a")
    ((lane, _),) = take_all(lanes)
    add(lanes, "a", 2)
    assert take_all(lanes) == [], "one delivery until the first has ended"
    end(lanes, lane)
    last = take_all(lanes)
    assert len(last) == 2
    for lane, _ in last:
        end(lanes, lane)
    add(lanes, "a", 5)
    assert len(take_all(lanes)) == 1


def test_deliveries_under_way_count_when_no_event_waits(lanes: Lanes) -> None:
    add(lanes, "a", 3)
    ((lane, _),) = take_all(lanes)
    end(lanes, lane)
    (ended, _), (hanging, _) = take_all(lanes)
    assert ended is hanging
    end(lanes, ended)
    add(lanes, "a", 9)
    assert len(take_all(lanes)) == 3, "four concurrent deliveries, and one is still under way"


def test_a_full_lane_refuses_entries_and_others_do_not(lanes: Lanes) -> None:
    add(lanes, "a", LANE_EVENTS)
    assert not lanes.add(entry("a"))
    assert lanes.add(entry("b"))


def test_the_longest_stalled_lane_drops_its_newer_half(lanes: Lanes, clock: Clock) -> None:
    add(lanes, "moved", 50)
    long, short = add(lanes, "a", 10), add(lanes, "b", 4)
    assert lanes.drop_stalled() == [], "no lane has stalled yet"
    clock.now += 2 * STALLED_SECONDS
    taken = lanes.take_entry()
    assert taken is not None
    end(lanes, taken[0])  # of "moved", in time
    add(lanes, "c", 100)  # created just now
    assert lanes.drop_stalled() == long[:4:-1]
    assert lanes.drop_stalled() == long[4:2:-1]
    assert lanes.drop_stalled() == short[:1:-1]


def test_clear_keeps_only_deliveries_under_way(lanes: Lanes) -> None:
    add(lanes, "a", 5)
    add(lanes, "b", 5)
    ((lane, _), _) = take_all(lanes)
    lanes.clear()
    end(lanes, lane)
    assert take_all(lanes) == []
