"""The phases of a deploy follow from its record."""

import msgspec
import pytest

from gateway.deploys.phases import list_phases
from gateway.deploys.records import Deploy
from gateway.events.catalog import Kind


def at(second: int) -> str:
    return f"2026-07-02T10:00:{second:02}.000Z"


def shown(state: str, kind: Kind = "live", **fields: str) -> list[tuple[str, str, int | None]]:
    ids = {"id": "dep_1", "account": "acc_1", "app": "shop", "appId": "shop"}
    record = {**ids, "kind": kind, "state": state, "trigger": "hook", "createdAt": at(0), **fields}
    deploy = msgspec.convert(record, Deploy)
    return [
        (each.phase, each.state, None if each.durationMs is msgspec.UNSET else each.durationMs)
        for each in list_phases(deploy)
    ]


BUILT = {"startedAt": at(1), "checkingAt": at(11)}
LIVE = {**BUILT, "canaryAt": at(13), "finishedAt": at(43)}


@pytest.mark.parametrize(
    ("state", "fields", "phases"),
    [
        # The worker was stopped: its phases no longer count.
        ("queued", BUILT, [("waiting", None)] * 3),
        ("building", {**BUILT, "startedAt": at(20)}, [("running", None), ("waiting", None), ("waiting", None)]),
        ("checking", BUILT, [("done", 10_000), ("running", None), ("waiting", None)]),
        ("canary", {**BUILT, "canaryAt": at(13)}, [("done", 10_000), ("done", 2_000), ("running", None)]),
        ("live", LIVE, [("done", 10_000), ("done", 2_000), ("done", 30_000)]),
        # An external engine reports the end of a build, not its start.
        ("checking", {"startedAt": at(1), "checkingAt": at(1)}, [("done", None), ("running", None), ("waiting", None)]),
        (
            "failed",
            {**BUILT, "finishedAt": at(12), "error": "health: no answer"},
            [("done", 10_000), ("failed", 1_000), ("waiting", None)],
        ),
        (
            "canceled",
            {"startedAt": at(1), "finishedAt": at(3), "error": "canceled on request"},
            [("canceled", 2_000), ("canceled", None), ("canceled", None)],
        ),
    ],
)
def test_a_deploys_phases(state: str, fields: dict[str, str], phases: list[tuple[str, int | None]]) -> None:
    assert [(word, took) for _, word, took in shown(state, **fields)] == phases


def test_a_preview_has_no_canary() -> None:
    assert [phase for phase, *_ in shown("queued", "preview")] == ["build", "health"]
