"""An observation is written once for each version, with its events and the time of the next inspection."""

import time
from typing import Any

import pytest

from tests.lua.deliveries import DATA, EVENT_KEYS, GROUP, STREAM, Deliveries
from tests.lua.scripts import TAG

KNOWN, DUE, AWAITED = f"{TAG}:health:shop", f"{TAG}:probes", f"{TAG}:awaited"
HELD_UNTIL = 1_795_262_415_000
UNHEALTHY = ("evt_1", "acc", "shop", "app.unhealthy", DATA)


class Monitor(Deliveries):
    def observe(
        self,
        expected: str = "",
        version: str = "v1",
        *events: tuple[str, ...],
        known: tuple[str, ...] = ("state", "{}"),
        due: bool = True,
        again: int = 60_000,
        held_until: int = HELD_UNTIL,
        **bounds: int,
    ) -> int:
        keys = [KNOWN, *EVENT_KEYS, AWAITED, *([DUE] if due else [])]
        flat_events = [part for event in events for part in event]
        args = [expected, version, "shop", held_until, again, len(known), *known, *flat_events]
        return self.script("monitors/record_observation", **bounds)(keys, args)

    def known(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.client.hgetall(KNOWN).items()}

    def types(self) -> list[str]:
        return [fields[b"type"].decode() for _, fields in self.client.xrange(STREAM)]

    def awaited(self, event: str = "evt_1") -> str | None:
        value = self.client.get(f"{AWAITED}:{event}")
        return None if value is None else value.decode()


@pytest.fixture
def monitor(client: Any) -> Monitor:
    client.zadd(DUE, {"shop": HELD_UNTIL})
    return Monitor(client)


def test_written_with_its_event_and_due_again(monitor: Monitor) -> None:
    assert monitor.observe("", "v1", UNHEALTHY, ("evt_2", "acc", "shop", "app.recovered", DATA)) == 1
    assert monitor.known() == {"version": "v1", "state": "{}"}
    assert monitor.types() == ["app.unhealthy", "app.recovered"]
    assert abs(monitor.client.zscore(DUE, "shop") - (time.time() + 60) * 1000) < 5_000


def test_of_two_workers_that_saw_the_same_one_queues_the_event(monitor: Monitor) -> None:
    assert monitor.observe("", "v1", UNHEALTHY) == 1
    assert monitor.observe("", "v2", UNHEALTHY, again=0) == 0
    assert monitor.observe("v0", "v2", UNHEALTHY, again=0) == 0
    assert monitor.known()["version"] == "v1"
    assert monitor.types() == ["app.unhealthy"]
    assert abs(monitor.client.zscore(DUE, "shop") - (time.time() + 60) * 1000) < 5_000, "the loser sets no time"
    monitor.client.zadd(DUE, {"shop": HELD_UNTIL})  # held by the one that inspects, whose version is an old one
    assert monitor.observe("v0", "v2", UNHEALTHY) == 0
    assert abs(monitor.client.zscore(DUE, "shop") - time.time() * 1000) < 5_000, "it is inspected again at once"
    assert monitor.observe("v1", "v2") == 1
    assert monitor.known()["version"] == "v2"


def test_nothing_new_leaves_the_version_and_without_a_schedule_nothing_is_due(monitor: Monitor) -> None:
    monitor.observe("", "v1", due=False)
    assert monitor.client.zscore(DUE, "shop") == HELD_UNTIL
    assert monitor.observe("v1", "v2", known=()) == 1
    assert monitor.known()["version"] == "v1"
    assert monitor.client.zscore(DUE, "shop") != HELD_UNTIL


def test_an_app_that_has_become_due_meanwhile_stays_due_and_a_removed_one_is_not_written(monitor: Monitor) -> None:
    monitor.client.zadd(DUE, {"shop": 0})
    assert monitor.observe("", "v1", UNHEALTHY) == 1
    assert monitor.types() == ["app.unhealthy"]
    assert monitor.client.zscore(DUE, "shop") == 0
    monitor.client.zrem(DUE, "shop")
    assert monitor.observe("v1", "v2", UNHEALTHY) == 0
    assert (monitor.known()["version"], monitor.types()) == ("v1", ["app.unhealthy"])
    assert not monitor.client.exists(DUE)


def test_the_outcome_of_an_app_unhealthy_is_awaited(monitor: Monitor) -> None:
    crash = ("evt_2", "acc", "shop", "app.crashed", DATA)
    monitor.observe("", "v1", UNHEALTHY, crash)
    assert monitor.awaited() == "waiting"
    assert 86_400 < monitor.client.ttl(f"{AWAITED}:evt_1") <= 2 * 86_400
    assert monitor.awaited("evt_2") is None
    fall, other = monitor.read()
    for entry in (fall, other):
        _finish(monitor, entry)
    assert monitor.awaited() == "delivered"
    assert monitor.client.ttl(f"{AWAITED}:evt_1") > 86_400
    assert monitor.awaited("evt_2") is None
    monitor.observe("v1", "v2", ("evt_3", *UNHEALTHY[1:]), MAX_WAITING=0)
    assert monitor.awaited("evt_3") == "dropped"


def test_a_redelivery_can_improve_an_outcome_only(monitor: Monitor) -> None:
    monitor.observe("", "v1", UNHEALTHY)
    for outcome, known in (("failed", "failed"), ("delivered", "delivered"), ("failed", "delivered")):
        (entry,) = monitor.read()
        _finish(monitor, entry, outcome)
        assert monitor.awaited() == known
        monitor.script("events/emit_event")(EVENT_KEYS, list(UNHEALTHY))
    monitor.client.delete(f"{AWAITED}:evt_1")
    (entry,) = monitor.read()
    _finish(monitor, entry)
    assert monitor.awaited() is None, "nothing awaits it any longer"


def _finish(monitor: Monitor, entry: Any, outcome: str = "delivered") -> None:
    fields = entry.fields
    event = [fields["id"], fields["account"], fields["app"], fields["type"]]
    args = [GROUP, entry.id, *event, outcome, 1782979200123, 45, "", ""]
    keys = [*EVENT_KEYS, f"{AWAITED}:{fields['id']}"]
    assert monitor.script("events/record_delivery")(keys, args) == 1
