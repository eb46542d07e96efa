"""A change that was refused leaves neither an entry nor a count."""

from typing import Any

import pytest

from tests.lua.trails import COUNTS, STREAM, Trails


@pytest.fixture
def trails(client: Any) -> Trails:
    return Trails(client)


def test_a_refused_change_leaves_no_entry(client: Any, trails: Trails) -> None:
    kept = trails.add("ana", "publish", "notes")
    refused = trails.add("ana", "publish", "other")
    assert trails.take_back("ana", refused) == 0
    assert trails.list() == [(b"ana", b"notes")]
    assert client.lrange(trails.of("ana"), 0, -1) == [kept]


def test_one_of_several_equal_changes(client: Any, trails: Trails) -> None:
    entry, *_ = [trails.add("ana", "publish", "notes") for _ in range(3)]
    assert trails.take_back("ana", entry) == 2
    assert client.hgetall(COUNTS) == {entry: b"2"}
    assert trails.take_back("ana", entry) == 1
    assert not client.exists(COUNTS)
    assert trails.list() == [(b"ana", b"notes")]
    assert trails.take_back("ana", entry) == 0
    assert not client.exists(STREAM) or trails.list() == []


def test_after_a_refusal_an_equal_change_is_another_entry(client: Any, trails: Trails) -> None:
    refused = trails.add("ana", "publish", "notes")
    trails.take_back("ana", refused)
    made = trails.add("ana", "publish", "notes")
    assert made != refused
    assert trails.add("ana", "publish", "notes") == made
    assert client.hgetall(COUNTS) == {made: b"2"}


def test_an_entry_that_has_left_meanwhile(client: Any, trails: Trails) -> None:
    first = trails.add("ci", "publish", "notes")
    for n in range(4):
        trails.add("ci", "publish", f"app-{n}")
    before = trails.list()
    assert trails.take_back("ci", first) == 0
    assert trails.list() == before


def test_refusals_push_out_nobody(client: Any, trails: Trails) -> None:
    """At the limit, the entry of a refused change has taken the place of one old entry, and the next takes none."""
    for n in range(20):
        trails.add(f"actor-{n}", "publish", "notes")
    for n in range(50):
        trails.take_back("ci", trails.add("ci", "publish", f"app-{n}"))
    assert trails.list() == [(b"actor-%d" % n, b"notes") for n in range(1, 20)]
