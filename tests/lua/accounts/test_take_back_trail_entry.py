"""A change that was refused leaves neither an entry nor a count."""

from typing import Any

from tests.lua.trails import COUNTS, Trails


def test_refusals_push_out_nobody(client: Any) -> None:
    """At the limit, the entry of a refused change has taken the place of one old entry, and the next takes none."""
    trails = Trails(client)
    for n in range(20):
        trails.add(f"actor-{n}", "publish", "notes")
    for n in range(5):
        trails.take_back("ci", trails.add("ci", "publish", f"app-{n}"))
    assert trails.list() == [(b"actor-%d" % n, b"notes") for n in range(1, 20)]
    assert not client.exists(trails.of("ci"), COUNTS)
