"""The account API: the data of an app, its snapshots, and the data of deleted apps."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from litestar import delete, get, post
from litestar.params import FromPath, JSONBody
from litestar.response import Stream

from gateway.accounts.pacing import UNPACED
from gateway.accounts.records import Account, App, find_suspension
from gateway.api.authentication import account_router
from gateway.api.deploys import QueuedDeployId
from gateway.api.resources import Caller, CallerAccess, OwnApp
from gateway.data.commands import Action, DataAnswer, DataCommands, DataUnavailable
from gateway.data.records import DataRecords, DataState, DeletedData, Reason, Snapshot, snapshot_key
from gateway.deploys.actions import DeployActions
from gateway.errors import (
    AppSuspended,
    DeployQuotaReached,
    NoDeployYet,
    NotFound,
    RateLimited,
    RequestMalformed,
    ServiceError,
    StorageFull,
    StorageUnavailable,
    TarballGone,
)
from gateway.keys import data_snapshots_made_key
from gateway.loops import Allowance
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.settings import Settings
from gateway.storage import Object, Storage
from gateway.validation import Id

SNAPSHOTS = Allowance(data_snapshots_made_key, 6, 3_600, "An app's data can be kept {limit} times per hour")
ANSWER_SECONDS = 600.0  # for the host of the data
FIRST_ANSWER_SECONDS = 10.0  # while no host has reported data
NO_DATA_SECONDS = 2.0  # and the app seems to have no start command
MIB = 1 << 20


class DataView(msgspec.Struct):
    usedBytes: int
    limitBytes: int
    state: DataState | Literal["suspended"]
    snapshots: list[Snapshot]  # newest first
    problem: str | msgspec.UnsetType = msgspec.UNSET  # what to do


class Restore(msgspec.Struct, forbid_unknown_fields=True):
    snapshotId: Id


@get("/apps/{app:str}/data", errors=[NotFound])
async def show_data(
    account: Caller,
    own_app: OwnApp,
    settings: Injected[Settings],
    data_records: Injected[DataRecords],
) -> DataView:
    """Show the data of an app's start command, and their snapshots."""
    return await view_data(own_app, account, settings, data_records)


async def view_data(app: App, account: Account, settings: Settings, data_records: DataRecords) -> DataView:
    status = await data_records.read_status(app)
    stopped = status.state in ("running", "asleep") and find_suspension(app, account) is not None
    return DataView(
        usedBytes=status.usedBytes,
        limitBytes=settings.app_data[account.plan] * MIB,
        state="suspended" if stopped else status.state,
        snapshots=await data_records.list_snapshots(app.account, app.id),
        problem=status.problem or msgspec.UNSET,
    )


@post(
    "/apps/{app:str}/data/snapshots",
    errors=[NotFound, RateLimited, StorageUnavailable, StorageFull],
    opt={UNPACED: True},
)
async def make_snapshot(
    account: Caller,
    own_app: OwnApp,
    store: Injected[Store],
    data_records: Injected[DataRecords],
    data_commands: Injected[DataCommands],
) -> Snapshot:
    """Make a snapshot of an app's data.

    6 per hour. The response comes when the snapshot is stored, which can take minutes.
    """
    try:
        await SNAPSHOTS.count(store, account.id, own_app.id)
        answer = await _command(own_app, "snapshot", "manual", data_records, data_commands)
        if answer.snapshot is None:
            raise NotFound("This app has no data yet; its start command writes them to DATA_DIR.")
    except ServiceError:  # only snapshots that were made count
        await SNAPSHOTS.take_back(store, account.id, own_app.id)
        raise
    return answer.snapshot


@get(
    "/apps/{app:str}/data/snapshots/{snapshot_id:str}",
    media_type="application/gzip",
    errors=[NotFound, StorageUnavailable],
)
async def download_snapshot(
    account: Caller,
    own_app: OwnApp,
    snapshot_id: FromPath[str],
    storage: Injected[Storage],
    data_records: Injected[DataRecords],
) -> Stream:
    """Download a snapshot: a tar.gz with names relative to `DATA_DIR`."""
    kept = await data_records.list_snapshots(own_app.account, own_app.id)
    if not any(snapshot.id == snapshot_id for snapshot in kept):
        raise _unknown_snapshot()
    content = await storage.open(snapshot_key(own_app.id, snapshot_id))
    if content is None:
        raise _unknown_snapshot()
    headers = {
        "content-disposition": f'attachment; filename="{own_app.name}-{snapshot_id}.tar.gz"',
        "content-length": str(content.size),
        "content-type": "application/gzip",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    return Stream(_read(content), headers=headers)


async def _read(content: Object) -> AsyncGenerator[bytes]:
    async with aclosing(content.chunks) as chunks:
        async for chunk in chunks:
            yield chunk


@post(
    "/apps/{app:str}/data/restore",
    status_code=202,
    errors=[RequestMalformed, AppSuspended, NotFound, NoDeployYet, TarballGone, DeployQuotaReached],
)
async def restore_data(
    account: Caller,
    own_app: OwnApp,
    data: JSONBody[Restore],
    access: CallerAccess,
    deploy_actions: Injected[DeployActions],
    data_records: Injected[DataRecords],
) -> QueuedDeployId:
    """Restore an app's data from a snapshot.

    Queues a deploy of the live release on these data. The present data are kept as a snapshot first. The snapshot is
    one of the app, or of a deleted app of the account.
    """
    key = await data_records.find_snapshot(own_app, data.snapshotId)
    if key is None:
        raise _unknown_snapshot()
    return QueuedDeployId(await deploy_actions.restore(own_app, key, access.name))


@delete("/apps/{app:str}/data", errors=[NotFound, StorageUnavailable, StorageFull], opt={UNPACED: True})
async def clear_data(
    account: Caller,
    own_app: OwnApp,
    data_records: Injected[DataRecords],
    data_commands: Injected[DataCommands],
) -> None:
    """Clear an app's data.

    The app starts again with an empty folder. What was there is kept as a snapshot first.
    """
    await _command(own_app, "clear", "clear", data_records, data_commands)


@get("/data/deleted")
async def list_deleted_data(account: Caller, data_records: Injected[DataRecords]) -> list[DeletedData]:
    """List the data of deleted apps, which are kept for 7 days. Any app of the account can restore them."""
    return await data_records.list_deleted(account.id)


async def _command(
    app: App, action: Action, reason: Reason, data_records: DataRecords, data_commands: DataCommands
) -> DataAnswer:
    """Sends a command to the host of the app's data, if it may have some. Raises DataUnavailable and StorageFull."""
    known = await data_records.has_data(app.account, app.id)
    # The release that runs may have a start command of which this copy of the record does not tell.
    starts = app.build is not None and app.build.start is not None
    seconds = ANSWER_SECONDS if known else FIRST_ANSWER_SECONDS if starts else NO_DATA_SECONDS
    try:
        answer = await data_commands.run(app.account, app.id, action, seconds, reason=reason)
    except DataUnavailable:
        if known or starts:
            raise
        return DataAnswer()
    if answer.error:
        raise (StorageFull if answer.is_full else DataUnavailable)(answer.error)
    return answer


def _unknown_snapshot() -> NotFound:
    return NotFound("The app has no such snapshot; 'capsule data show' lists its snapshots.")


ROUTES: list[Any] = [
    account_router(show_data, make_snapshot, download_snapshot, restore_data, clear_data, list_deleted_data)
]
