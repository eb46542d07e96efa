"""Equal changes are counted with one entry, and one actor has a share of a part of the trail."""

import random
from typing import Any

import pytest

from tests.lua.scripts import DAY, ON_VALKEY, TAG, set_clock
from tests.lua.trails import COUNTS, MAX, SHARE, STREAM, Trails

LAST = f"{TAG}:audit:acc:last:"
OLD = {"who": "ana", "by": "key", "action": "publish", "target": "old"}  # of an older version, in nobody's list


@pytest.fixture
def trails(client: Any) -> Trails:
    return Trails(client)


@ON_VALKEY
@pytest.mark.parametrize("actors", [2, 12])
def test_any_history(client: Any, trails: Trails, actors: int) -> None:
    """Changes that are made or refused: the newest entries stay, at most 20 and 4 of one actor, with their counts."""
    chance, pause = random.Random(actors), 0
    kept: dict[bytes, list[Any]] = {}  # actor, target and number of equal changes, by entry
    last: dict[tuple[str, str], bytes] = {}
    gone: list[tuple[str, bytes]] = []
    for step in range(400):
        if step % 50 == 25:
            kept[client.xadd(STREAM, OLD)] = ["", "old", 1]
        if step % 100 == 99:  # nothing happens for longer than entries are kept
            pause = 91 * DAY
        change = f"actor-{chance.randrange(actors)}", f"app-{chance.randrange(8)}"
        known = last.get(change)
        if known not in kept:
            set_clock(client, trails.now + pause)
            own = [entry for entry, (actor, *_) in kept.items() if actor == change[0]]
            leaving = own[: max(0, len(own) - SHARE + 1)]
            others = [entry for entry in kept if entry not in leaving]
            leaving += others[:10] if pause else others[: max(0, len(others) - MAX + 1)]
            gone += [(kept.pop(entry)[0], entry) for entry in leaving]
            pause = 0
        entry = trails.add(change[0], "publish", change[1])
        assert (entry == known) == (known in kept)
        kept.setdefault(entry, [*change, 0])[2] += 1
        last[change] = entry
        set_clock(client, trails.now)
        if chance.random() < 0.2:
            kept[entry][2] -= 1
            assert trails.take_back(change[0], entry) == kept[entry][2]
            if not kept[entry][2]:
                del kept[entry]
        elif gone and chance.random() < 0.1:
            assert trails.take_back(*gone.pop()) == 0, "it has left meanwhile"
        assert trails.list() == [((actor or "ana").encode(), target.encode()) for actor, target, _ in kept.values()]
        counts = {entry: b"%d" % count for entry, (_, _, count) in kept.items() if count > 1}
        assert client.hgetall(COUNTS) == counts
    assert all(client.llen(key) <= SHARE for key in client.scan_iter(trails.of("*")))


def test_a_minute_later_it_is_another_entry(client: Any, trails: Trails) -> None:
    first = trails.add("ana", "publish", "notes")
    assert trails.add("ana", "publish", "notes") == first
    assert all(0 < client.ttl(key) <= 60 for key in client.scan_iter(f"{LAST}*"))
    for key in (STREAM, COUNTS, trails.of("ana")):
        assert 89 * 86_400 < client.ttl(key) <= 90 * 86_400
    client.delete(*client.scan_iter(f"{LAST}*"))  # as when it expires
    assert trails.add("ana", "publish", "notes") != first
    assert trails.list() == [(b"ana", b"notes")] * 2
