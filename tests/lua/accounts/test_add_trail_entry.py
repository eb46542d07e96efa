"""Equal changes are counted with one entry, and one actor has a share of a part of the trail."""

from typing import Any

import pytest

from tests.lua.scripts import DAY, TAG, set_clock
from tests.lua.trails import COUNTS, STREAM, Trails

LAST = f"{TAG}:audit:acc:last:"


@pytest.fixture
def trails(client: Any) -> Trails:
    return Trails(client)


def test_equal_changes_are_counted_with_one_entry(client: Any, trails: Trails) -> None:
    entries = [trails.add("ana", "clear_build_cache", "notes") for _ in range(5)]
    assert len(set(entries)) == 1
    assert client.hgetall(COUNTS) == {entries[0]: b"5"}
    assert trails.add("bob", "clear_build_cache", "notes") != entries[0]
    assert trails.add("ana", "clear_build_cache", "other") != entries[0]
    assert trails.list() == [(b"ana", b"notes"), (b"bob", b"notes"), (b"ana", b"other")]
    assert all(0 < client.ttl(key) <= 60 for key in client.scan_iter(f"{LAST}*"))


def test_a_minute_later_it_is_another_entry(client: Any, trails: Trails) -> None:
    first = trails.add("ana", "publish", "notes")
    client.delete(*client.scan_iter(f"{LAST}*"))  # as when it expires
    assert trails.add("ana", "publish", "notes") != first
    assert trails.list() == [(b"ana", b"notes")] * 2
    assert not client.exists(COUNTS)


def test_one_actor_has_a_share(client: Any, trails: Trails) -> None:
    trails.add("ana", "create_key", "key_1")
    for n in range(30):
        trails.add("ci", "publish", f"app-{n}")
    assert trails.list() == [(b"ana", b"key_1"), *[(b"ci", b"app-%d" % n) for n in range(26, 30)]]
    assert client.llen(trails.of("ci")) == 4


def test_all_together_have_a_limit(client: Any, trails: Trails) -> None:
    for n in range(100):
        trails.add(f"actor-{n % 10}", "publish", f"app-{n}")
    assert [target for _, target in trails.list()] == [b"app-%d" % n for n in range(80, 100)]
    # An actor's list drops what the stream has lost with the actor's next change.
    for n in range(3):
        trails.add("actor-0", "publish", f"more-{n}")
    assert client.llen(trails.of("actor-0")) == 4
    assert len(trails.list()) == 20


def test_counts_leave_with_their_entries(client: Any, trails: Trails) -> None:
    for n in range(10):
        for _ in range(2):
            trails.add("ci", "publish", f"app-{n}")
    assert client.hlen(COUNTS) == 4
    for n in range(30):
        trails.add(f"actor-{n}", "publish", "notes")
    assert not client.exists(COUNTS)


def test_an_entry_that_is_gone_counts_nothing(client: Any, trails: Trails) -> None:
    first = trails.add("ci", "publish", "notes")
    for n in range(4):
        trails.add("ci", "publish", f"app-{n}")
    assert trails.add("ci", "publish", "notes") != first
    assert not client.exists(COUNTS)


def test_old_entries_leave(client: Any, trails: Trails) -> None:
    for n in range(3):
        trails.add("ana", "publish", f"app-{n}")
    set_clock(client, trails.now + 91 * DAY)
    trails.add("ana", "publish", "notes")
    assert trails.list() == [(b"ana", b"notes")]
    set_clock(client, trails.now)
    trails.add("ana", "publish", "other")
    assert client.llen(trails.of("ana")) == 2


def test_entries_of_an_older_version_are_in_nobodys_list(client: Any, trails: Trails) -> None:
    fields = {"who": "ana", "by": "key", "action": "publish", "target": "old"}
    for _ in range(25):
        client.xadd(STREAM, fields)
    for n in range(10):
        trails.add("ci", "publish", f"app-{n}")
    assert len(trails.list()) == 20
    assert trails.list()[-4:] == [(b"ci", b"app-%d" % n) for n in range(6, 10)]


def test_all_keys_expire(client: Any, trails: Trails) -> None:
    for _ in range(2):
        trails.add("ana", "publish", "notes")
    for key in (STREAM, COUNTS, trails.of("ana")):
        assert 89 * 86_400 < client.ttl(key) <= 90 * 86_400
