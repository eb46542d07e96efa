"""Deploys as their account sees them: with the position in the queue, the phases and the log."""

import datetime
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from gateway.deploys.addresses import address
from gateway.deploys.logs import DeployLogs, Line, count_lines, read_lines, skip_lines
from gateway.deploys.next_step import NextStep, find_next_step
from gateway.deploys.phases import PhaseView, list_phases
from gateway.deploys.records import Deploy, DeployRecords, State, Trigger
from gateway.events.catalog import Kind
from gateway.ids import Time


class DeployView(msgspec.Struct, kw_only=True):
    """A deploy as its account sees it."""

    id: str
    app: str
    kind: Kind
    state: State
    trigger: Trigger
    createdAt: Time
    current: bool | msgspec.UnsetType = msgspec.UNSET  # its address serves its release
    by: str | msgspec.UnsetType = msgspec.UNSET  # an API key's or a hook's name, a member's address, or "operator"
    message: str | msgspec.UnsetType = msgspec.UNSET  # of the commit, or the publisher's own
    commit: str | msgspec.UnsetType = msgspec.UNSET
    branch: str | msgspec.UnsetType | None = msgspec.UNSET
    dirty: bool | msgspec.UnsetType = msgspec.UNSET  # its source has changes that are not in the commit
    finishedAt: Time | msgspec.UnsetType = msgspec.UNSET
    durationMs: int | msgspec.UnsetType = msgspec.UNSET
    url: str | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET  # what its source lacks, or what of it does not count
    release: str | msgspec.UnsetType = msgspec.UNSET  # the deploy whose release this one serves again
    stillServed: str | msgspec.UnsetType = msgspec.UNSET  # after a failure: the deploy that its address still serves
    # Only for queued deploys.
    position: int | msgspec.UnsetType = msgspec.UNSET  # 1 is next
    waitsFor: str | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, deploy: Deploy, **more: Any) -> Self:
        """Leaves out the fields that have no value yet. `more` are the fields of a subclass."""
        fields = {name: getattr(deploy, name, None) for name in DeployView.__struct_fields__}
        return cls(**{**{name: value for name, value in fields.items() if value is not None}, **more})


class DeployWithLog(DeployView, kw_only=True):
    phases: list[PhaseView]
    nextStep: NextStep | msgspec.UnsetType = msgspec.UNSET  # after a failure
    log: str
    logTimes: list[int | None]  # of each line of the log: ms after `createdAt`, or null
    logLines: int  # so far, with those that a long log lacks: `logAfter` of the next request


async def view_deploys(listed: Sequence[Deploy], records: DeployRecords) -> list[DeployView]:
    """Returns deploys of one account as it sees them, the queued ones with their positions."""
    more = await _read_more(listed, records)
    return [DeployView.of(deploy, **fields) for deploy, fields in zip(listed, more, strict=True)]


async def view_with_log(deploy: Deploy, records: DeployRecords, logs: DeployLogs, log_after: int = 0) -> DeployWithLog:
    """Returns the deploy with its log, without the first `log_after` lines."""
    [fields] = await _read_more([deploy], records)
    lines = read_lines(await logs.read(deploy))
    shown = skip_lines(lines, log_after)
    queued = int(datetime.datetime.fromisoformat(deploy.createdAt).timestamp() * 1000)
    if (step := find_next_step(deploy, _join(lines))) is not None:
        fields["nextStep"] = step
    return DeployWithLog.of(
        deploy,
        phases=list_phases(deploy),
        log=_join(shown),
        logTimes=[None if line.time is None else max(0, line.time - queued) for line in shown],
        logLines=count_lines(lines),
        **fields,
    )


def _join(lines: Sequence[Line]) -> str:
    return "".join(f"{line.text}\n" for line in lines)


async def _read_more(listed: Sequence[Deploy], records: DeployRecords) -> list[dict[str, Any]]:
    """Returns the fields of each deploy that are not in its record."""
    if not listed:
        return []
    waits = await records.find_positions(listed)
    served = await records.find_served(listed[0].account, {deploy.appId for deploy in listed})
    found = []
    for deploy in listed:
        now = served.get((deploy.appId, address(deploy.kind, deploy.branch)))
        fields = {"current": deploy.id == now, **waits.get(deploy.id, {})}
        if now is not None and deploy.state in ("failed", "canceled"):
            fields["stillServed"] = now
        found.append(fields)
    return found
