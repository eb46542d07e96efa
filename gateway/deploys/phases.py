"""The phases of a deploy, with the duration of each."""

import datetime
from typing import Literal

import msgspec

from gateway.deploys.records import FINAL, Deploy
from gateway.events.catalog import Phase
from gateway.ids import Time

PhaseState = Literal["waiting", "running", "done", "failed", "canceled"]
PHASES: dict[str, Phase] = {"building": "build", "checking": "health", "canary": "canary"}


class PhaseView(msgspec.Struct, kw_only=True):
    phase: Phase
    state: PhaseState
    startedAt: Time | msgspec.UnsetType = msgspec.UNSET
    durationMs: int | msgspec.UnsetType = msgspec.UNSET


def list_phases(deploy: Deploy) -> list[PhaseView]:
    """Returns the phases in their order. A preview has no canary."""
    phases: list[Phase] = ["build", "health", "canary"] if deploy.kind == "live" else ["build", "health"]
    starts = _starts(deploy)
    current = find_phase(deploy)
    ended = deploy.finishedAt if deploy.state in FINAL else None
    views = []
    for number, phase in enumerate(phases):
        start, following = starts.get(phase), starts.get(phases[number + 1]) if number + 1 < len(phases) else None
        view = PhaseView(phase=phase, state=_state(deploy, phase, current, phases))
        if start is not None:
            view.startedAt = start
            end = following or ended
            if end is not None and end > start:  # an external engine reports only the end of its build
                view.durationMs = _milliseconds(start, end)
        views.append(view)
    return views


def _starts(deploy: Deploy) -> dict[str, str]:
    """Returns the start of each phase. Times of the first run of a deploy that was queued again do not count."""
    began = deploy.startedAt if deploy.state != "queued" else None
    starts = {"build": began, "health": deploy.checkingAt, "canary": deploy.canaryAt}
    return {phase: start for phase, start in starts.items() if began and start and start >= began}


def find_phase(deploy: Deploy) -> str:
    """Returns the phase in which the deploy is or ended; '' if it has not begun."""
    unknown = "build" if deploy.state == "failed" else ""  # an external engine reports only the end of its build
    return PHASES.get(deploy.state) or next(reversed(_starts(deploy)), unknown)


def _state(deploy: Deploy, phase: Phase, current: str, phases: list[Phase]) -> PhaseState:
    if deploy.state == "live":
        return "done"
    if current not in phases or phases.index(phase) > phases.index(current):
        return "canceled" if deploy.state == "canceled" else "waiting"
    if phase != current:
        return "done"
    ends: dict[str, PhaseState] = {"failed": "failed", "canceled": "canceled"}
    return ends.get(deploy.state, "running")


def _milliseconds(start: str, end: str) -> int:
    passed = datetime.datetime.fromisoformat(end) - datetime.datetime.fromisoformat(start)
    return int(passed.total_seconds() * 1000)
