"""A worker takes the apps that are due, and no other worker gets them."""

from typing import Any

import pytest

from tests.lua.scripts import SECOND, TAG, on_test_clock, set_clock

NOON = 1_795_262_400  # seconds
DUE, SITES, KNOWN = f"{TAG}:probes", f"{TAG}:site", f"{TAG}:health"
HELD_MS = 15_000


class Due:
    def __init__(self, client: Any) -> None:
        self.client = client
        self._due = client.register_script(on_test_clock("monitors/take_due_apps"))
        self.set_clock(NOON)

    def set_clock(self, seconds: float) -> None:
        set_clock(self.client, int(seconds * SECOND))

    def enter(self, **apps: float) -> None:
        """Returns each app and the second in which it is due."""
        self.client.zadd(DUE, {app: int(seconds * 1000) for app, seconds in apps.items()})

    def take(self, at_most: int = 100) -> list[str]:
        return [app_id.decode() for app_id, _, _ in self.answer(at_most)[2:]]

    def answer(self, at_most: int = 100) -> list[Any]:
        return self._due([DUE, SITES, KNOWN], [at_most, HELD_MS])

    def scores(self) -> dict[str, int]:
        return {app.decode(): int(score) for app, score in self.client.zrange(DUE, 0, -1, withscores=True)}


@pytest.fixture
def due(client: Any) -> Due:
    return Due(client)


def test_due_at_its_time_and_no_other_worker_gets_it_until_the_hold_ends(due: Due) -> None:
    due.enter(a=NOON + 0.001, b=NOON + 60)
    assert due.take() == []
    due.set_clock(NOON + 0.001)
    assert due.take() == ["a"]
    assert due.scores() == {"a": NOON * 1000 + 1 + HELD_MS, "b": (NOON + 60) * 1000}
    due.set_clock(NOON + HELD_MS / 1000)
    assert due.take() == []
    due.set_clock(NOON + 0.001 + HELD_MS / 1000)
    assert due.take() == ["a"]


def test_the_longest_due_first_within_the_limit(due: Due) -> None:
    due.enter(a=NOON - 3, b=NOON - 9, c=NOON - 1, d=NOON - 5)
    assert due.take(3) == ["b", "d", "a"]
    assert due.take(3) == ["c"]
    assert due.take(3) == []


def test_the_record_is_returned_with_the_app(due: Due) -> None:
    due.client.hset(f"{SITES}:a", mapping={"live": "dep_1", "source": "src_1"})
    due.client.hset(f"{SITES}:b", mapping={"source": "src_1"})
    due.client.hset(f"{KNOWN}:a", mapping={"version": "v", "state": "{}"})
    due.enter(a=1, b=2, c=3)
    now, held_until, *taken = due.answer()
    assert (int(now), int(held_until)) == (NOON * 1000, NOON * 1000 + HELD_MS)
    assert taken[0][:2] == [b"a", b"dep_1"]
    flat = taken[0][2]
    assert dict(zip(flat[::2], flat[1::2], strict=True)) == {b"version": b"v", b"state": b"{}"}
    assert taken[1:] == [[b"b", b"", []], [b"c", b"", []]]
