"""The state machine of an app's health, step by step, and under any sequence of probes and outcomes."""

from collections.abc import Iterator, Mapping
from itertools import count, pairwise

import msgspec
from hypothesis import given
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

    def fails(self, times: int = FAILURES) -> list[str]:
        return self.probe(*["status"] * times)

    def outcome(self, outcome: str | None) -> None:
        """Sets the outcome of the last app.unhealthy."""
        self.outcomes[[i for i, event in self.notified if isinstance(event, AppUnhealthy)][-1]] = outcome


def test_the_third_failure_in_a_row_is_notified_once() -> None:
    app = Machine()
    assert app.probe("", "status", "status", "", "timeout", "dns") == []
    assert app.probe("connect") == ["app.unhealthy"]
    assert app.notified[0][1] == AppUnhealthy(url=URL, failures=3, reason="connect")
    assert app.fails(10) == []


def test_the_failures_of_an_app_that_never_answered() -> None:
    app = Machine()
    assert app.fails() == ["app.unhealthy"]
    assert health.status_and_since(app.health) == ("unhealthy", "2026-07-02T08:01:00.000Z")


def test_the_recovery_is_sent_when_the_app_unhealthy_was_delivered() -> None:
    app = Machine()
    app.fails()
    app.outcome("delivered")
    assert app.probe("tls", "") == ["app.recovered"]
    recovered = AppRecovered(url=URL, downSince="2026-07-02T08:01:00.000Z", downMs=4 * MINUTE)
    assert app.notified[-1][1] == recovered
    assert app.probe("", "") == []


def test_the_recovery_is_not_sent_when_the_app_unhealthy_was_not_delivered() -> None:
    for outcome in ("failed", "dropped", None):
        app = Machine()
        app.fails()
        app.outcome(outcome)
        assert app.probe("", "") == []
        app.outcome("delivered")  # by a redelivery, after the recovery was discarded
        assert app.probe("") == []


def test_a_redelivery_in_time_counts() -> None:
    app = Machine()
    app.fails()
    app.outcome("failed")
    app.fails(1)
    app.outcome("delivered")
    assert app.probe("") == ["app.recovered"]


def test_the_recovery_waits_for_the_outcome() -> None:
    app = Machine()
    app.fails()
    assert app.probe("", "", "") == []
    app.outcome("delivered")
    assert app.probe("") == ["app.recovered"]
    recovered = app.notified[-1][1]
    assert isinstance(recovered, AppRecovered)
    assert recovered.downMs == 3 * MINUTE, "until it answered, not until the outcome"
    assert app.probe("") == []


def test_a_recovery_waits_for_one_day() -> None:
    app = Machine()
    app.fails()
    app.probe("")
    app.probe("", every=PENDING_MS - MINUTE)
    assert app.health.pending
    app.probe("")
    assert not app.health.pending
    app.outcome("delivered")
    assert app.probe("") == []


def test_an_outcome_that_comes_in_the_next_outage() -> None:
    """Each outage keeps its own recovery."""
    app = Machine()
    app.fails()
    app.probe("")
    app.now += COOLDOWN
    assert app.fails() == ["app.unhealthy"]
    app.outcomes["evt_0"] = "delivered"
    assert app.fails(1) == ["app.recovered"]
    app.outcome("delivered")
    assert app.probe("") == ["app.recovered"]
    assert [event.downMs for _, event in app.notified if isinstance(event, AppRecovered)] == [3 * MINUTE, 4 * MINUTE]


def test_the_cooldown_suppresses_an_outage_and_its_recovery() -> None:
    app = Machine()
    app.fails()
    app.outcome("delivered")
    assert app.probe("") == ["app.recovered"]
    for _ in range(2):
        assert app.fails() == []
        assert health.status_and_since(app.health)[0] == "unhealthy"
        assert app.probe("", "") == []


def test_an_outage_longer_than_the_cooldown_is_notified_when_the_cooldown_ends() -> None:
    app = Machine()
    app.fails()
    app.outcome("delivered")
    app.probe("")
    assert app.fails(13) == [], "14 minutes after the last one"
    assert app.fails(1) == ["app.unhealthy"]
    assert app.notified[-1][1] == AppUnhealthy(url=URL, failures=14, reason="status")
    app.outcome("delivered")
    assert app.probe("") == ["app.recovered"]


def test_after_the_cooldown_the_next_outage_is_notified() -> None:
    app = Machine()
    app.fails()
    app.outcome("failed")
    app.probe("")
    app.now += COOLDOWN
    assert app.fails() == ["app.unhealthy"]


def test_the_status_and_its_start() -> None:
    app = Machine()
    assert health.status_and_since(app.health) == ("unknown", None)
    app.probe("timeout")
    assert health.status_and_since(app.health) == ("unknown", None)
    app.probe("", "", "timeout", "timeout")
    assert health.status_and_since(app.health) == ("healthy", "2026-07-02T08:02:00.000Z")
    app.probe("timeout", "timeout")
    assert health.status_and_since(app.health) == ("unhealthy", "2026-07-02T08:04:00.000Z"), (
        "since the first of the failures"
    )
    app.probe("", "")
    assert health.status_and_since(app.health) == ("healthy", "2026-07-02T08:08:00.000Z")


def test_the_state_of_a_healthy_app_does_not_change() -> None:
    app = Machine()
    app.probe("")
    before = app.health
    app.probe("", "")
    assert app.health == before


def test_which_apps_are_probed() -> None:
    assert [health.is_probed(plan, True) for plan in ("free", "starter", "maker", "max")] == [False, True, True, True]
    assert not health.is_probed("max", False)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["", "", "status", "timeout"]),
        st.integers(1, COOLDOWN // 2),  # ms since the previous probe
        st.sampled_from(["waiting", "delivered", "failed", "dropped"]),  # of the oldest event without an outcome
    ),
    max_size=60,
)


@given(STEPS)
def test_any_sequence_of_steps(steps: list[tuple[Reason, int, str]]) -> None:
    app = Machine()
    row, outages, recoveries = 0, [], []
    delivered: set[int] = set()  # times of the outages whose app.unhealthy was delivered
    at: dict[str, int] = {}
    for reason, passed, outcome in steps:
        waiting = [event_id for event_id, known in app.outcomes.items() if known == "waiting"]
        if waiting:
            app.outcomes[waiting[0]] = outcome
            if outcome == "delivered":
                delivered.add(at[waiting[0]])
        before = len(app.notified)
        app.probe(reason, every=passed)
        # The state survives being stored and read again.
        assert health.decode_health(msgspec.json.encode(app.health).decode()) == app.health
        row = row + 1 if reason else 0
        for event_id, event in app.notified[before:]:
            if isinstance(event, AppUnhealthy):
                assert row >= FAILURES
                assert event.failures == row
                at[event_id] = app.now
                outages.append(app.now)
            else:
                assert isinstance(event, AppRecovered)
                assert event.downMs > 0
                recoveries.append(event)
        assert len(app.health.pending) <= len(outages)
    assert all(later - sooner >= COOLDOWN for sooner, later in pairwise(outages))
    assert len(recoveries) <= len(delivered), "at most one recovery for each delivered app.unhealthy"
    ids = [event_id for event_id, _ in app.notified]
    assert len(ids) == len(set(ids))
    _check_end(app, app.outcomes, len(delivered) - len(recoveries))


def _check_end(app: Machine, outcomes: Mapping[str, str | None], missing: int) -> None:
    """Checks that each delivered app.unhealthy gets its recovery once the app answers and all outcomes are known."""
    app.outcomes = {event_id: "failed" if known == "waiting" else known for event_id, known in outcomes.items()}
    assert app.probe("") == ["app.recovered"] * missing
