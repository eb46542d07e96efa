"""The state machine of an app's health, step by step, and under any sequence of probes and outcomes."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Literal

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.events.catalog import AppRecovered, AppUnhealthy, Event
from gateway.monitors import health
from gateway.monitors.health import FAILURES, PENDING_MS, AppHealth, Reason

URL = "https://shop.apps.example/"
COOLDOWN = 900_000
START = 1_782_979_200_000  # 2026-07-02T08:00:00Z
MINUTE = 60_000


class Machine:
    """An app that is probed every minute. Tests set the outcomes of its events."""

    def __init__(self) -> None:
        self.health, self.now = AppHealth(), START
        self.outcomes: dict[str, str | None] = {}
        self.notified: list[tuple[str, Event]] = []
        self._ids: Iterator[str] = map("evt_{}".format, count())

    def probe(self, *reasons: Reason, every: int = MINUTE) -> list[str]:
        """Applies the results of probes, and returns the types of the events that follow."""
        types = []
        for reason in reasons:
            self.now += every
            self.health, events = health.step(
                self.health,
                reason,
                self.outcomes,
                self.now,
                url=URL,
                cooldown=COOLDOWN,
                new_id=lambda: next(self._ids),
            )
            for event_id, event in events:
                self.notified.append((event_id, event))
                if isinstance(event, AppUnhealthy):
                    self.outcomes[event_id] = "waiting"
                types.append(event.type)
        return types


def test_an_outage_from_its_third_failure_to_its_recovery() -> None:
    app = Machine()
    assert app.probe("status") == []
    assert health.status_and_since(app.health) == ("unknown", None)
    app.probe("")
    healthy = app.health
    assert app.probe("", "status", "") == []
    assert app.health == healthy, "it does not change"
    assert app.probe("timeout", "dns") == []
    assert health.status_and_since(app.health) == ("healthy", "2026-07-02T08:02:00.000Z")
    assert app.probe("connect") == ["app.unhealthy"]
    assert app.notified[0][1] == AppUnhealthy(url=URL, failures=3, reason="connect")
    first = "2026-07-02T08:06:00.000Z"  # of the failures
    assert health.status_and_since(app.health) == ("unhealthy", first)
    assert app.probe("tls", "", "") == [], "its recovery waits for the outcome"
    assert health.status_and_since(app.health) == ("healthy", "2026-07-02T08:10:00.000Z")
    app.outcomes[app.notified[0][0]] = "delivered"
    assert app.probe("") == ["app.recovered"]
    recovered = AppRecovered(url=URL, downSince=first, downMs=4 * MINUTE)
    assert app.notified[-1][1] == recovered, "until it answered, not until the outcome"


def test_which_apps_are_probed() -> None:
    assert [health.is_probed(plan, True) for plan in ("free", "starter", "maker", "max")] == [False, True, True, True]
    assert not health.is_probed("max", False)


class Model:
    """When an account hears of its outages, as the module says it."""

    def __init__(self) -> None:
        self.row, self.since, self.up = 0, 0, 0  # of the failures; the present outage; the last answer after one
        self.notified: str | None = None  # the present outage's app.unhealthy
        self.notified_at: int | None = None
        self.ended: dict[str, tuple[int, int]] = {}  # outages whose recovery waits: their beginning and their end
        self.delivered: set[str] = set()

    def probe(self, failed: bool, now: int, outcomes: Mapping[str, str | None], next_id: str) -> list[tuple[str, int]]:
        """Returns the types of the events that follow, with the failures or the ms of the outage."""
        if self.notified and outcomes.get(self.notified) == "delivered":
            self.delivered.add(self.notified)
        events = []
        if failed:
            self.since = self.since if self.row or self.notified else now
            self.row += 1
            is_cool = self.notified_at is None or now - self.notified_at >= COOLDOWN
            if self.row >= FAILURES and self.notified is None and is_cool:
                self.notified, self.notified_at = next_id, now
                events.append(("app.unhealthy", self.row))
        else:
            if self.notified:
                self.ended[self.notified] = self.since, now
            self.row, self.notified = 0, None
        for event, (since, up) in [*self.ended.items()]:
            if event in self.delivered or outcomes.get(event) == "delivered":
                events.append(("app.recovered", up - since))
                del self.ended[event]
            elif outcomes.get(event) != "waiting" or now - up >= PENDING_MS:
                del self.ended[event]
        return events


def describe(event: Event) -> tuple[str, int]:
    assert isinstance(event, AppUnhealthy | AppRecovered)
    return event.type, event.failures if isinstance(event, AppUnhealthy) else event.downMs


# Probes with the same result, one after another; then an outcome.
RUNS = st.lists(
    st.tuples(
        st.sampled_from(["", "status", "timeout", "pause"]),  # paused: not probed for a while
        st.integers(1, FAILURES + 1),
        st.just(MINUTE) | st.integers(1, COOLDOWN // 2) | st.sampled_from([COOLDOWN, PENDING_MS]),  # between probes
        st.sampled_from(["waiting", "delivered", "failed", "dropped", None]),  # becomes the outcome
        st.integers(1, 4),  # of this one of the last events
    ),
    max_size=30,
)
DOWN, UP = ("status", FAILURES, MINUTE, "delivered", 1), ("", 1, MINUTE, "delivered", 1)
PAUSE = ("pause", 1, MINUTE, "delivered", 1)


@given(RUNS)
@example([DOWN, UP, DOWN, UP])  # within the cooldown
@example([DOWN, UP, ("status", 20, MINUTE, "delivered", 1), UP])  # beyond it
@example([DOWN, ("status", 1, MINUTE, "failed", 1), UP])  # delivered, then redelivered in vain
@example([DOWN, PAUSE, DOWN, PAUSE, UP, DOWN])
def test_any_sequence_of_probes(runs: list[tuple[Reason | Literal["pause"], int, int, str | None, int]]) -> None:
    """With redeliveries, whose outcomes replace others."""
    app, model = Machine(), Model()
    for reason, times, every, outcome, ago in runs:
        for _ in range(times):
            if reason == "pause":
                app.health, app.now, model.row = health.pause(app.health), app.now + every, 0
                assert health.status_and_since(app.health) == ("unknown", None)
                continue
            before = len(app.notified)
            expected = model.probe(bool(reason), app.now + every, app.outcomes, f"evt_{before}")
            app.probe(reason, every=every)
            # The state survives being stored and read again.
            assert health.decode_health(msgspec.json.encode(app.health).decode()) == app.health
            assert [describe(event) for _, event in app.notified[before:]] == expected
        if len(app.outcomes) >= ago:
            app.outcomes[[*app.outcomes][-ago]] = outcome
    ids = [event_id for event_id, _ in app.notified]
    assert len(ids) == len(set(ids))
