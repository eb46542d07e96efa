"""Deploys as their account sees them: with the position in the queue, the phases and the log."""

import datetime
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from gateway.deploys.logs import DeployLogs, count_lines, read_lines, skip_lines
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
    current: bool | msgspec.UnsetType = msgspec.UNSET  # the app serves its release
    branch: str | msgspec.UnsetType | None = msgspec.UNSET
    commit: str | msgspec.UnsetType = msgspec.UNSET
    finishedAt: Time | msgspec.UnsetType = msgspec.UNSET
    durationMs: int | msgspec.UnsetType = msgspec.UNSET
    url: str | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET  # what its source lacks
    release: str | msgspec.UnsetType = msgspec.UNSET  # the deploy whose release this one serves again
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
    return DeployWithLog.of(
        deploy,
        phases=list_phases(deploy),
        log="".join(f"{line.text}\n" for line in shown),
        logTimes=[None if line.time is None else max(0, line.time - queued) for line in shown],
        logLines=count_lines(lines),
        **fields,
    )


async def _read_more(listed: Sequence[Deploy], records: DeployRecords) -> list[dict[str, Any]]:
    """Returns the fields of each deploy that are not in its record."""
    if not listed:
        return []
    waits = await records.find_positions(listed)
    live = await records.find_live_ids(listed[0].account, {deploy.appId for deploy in listed})
    return [{"current": deploy.id in live, **waits.get(deploy.id, {})} for deploy in listed]
