"""Commands to the host that has the data of an app: make a snapshot, restore one, clear the data.

A command is a record that its host finds within a second (`workers/engine/data.py`). The host removes the
command together with writing its answer, so a host that is restarted carries it out again: every action can be
repeated. A host ignores and removes a command after its end, when nobody waits for the answer any longer. It may have
begun one before, and goes on for `COMMAND_SECONDS` at most. Where no host runs, commands that are over are removed by
whoever sends the next one.

Failure policy: a command without an answer fails with DataUnavailable. Then the host may still carry it out.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import msgspec

from gateway.accounts.records import App
from gateway.data.records import DataRecords, Reason, Snapshot
from gateway.errors import StorageUnavailable
from gateway.ids import new_id
from gateway.keys import PARTITION_TAGS, data_answer_key, data_commands_key, partition_tag
from gateway.loops import until
from gateway.redis.client import Store, patient

MAX_COMMANDS, MAX_COMMANDS_OF_ACCOUNT = 1_000, 100  # that wait: of a partition, and of an account in it
KEPT_SECONDS = 7 * 86_400
COMMAND_SECONDS = 3_600.0  # for which a host carries out one command, with outages of the storage
ANSWER_SECONDS = 3_600
POLL_SECONDS = 0.2  # between looks for the answer

Action = Literal["snapshot", "restore", "undo", "confirm", "clear", "forget"]


class DataUnavailable(StorageUnavailable):
    """No host has answered for an app's data."""

    message = "The host with the app's data does not answer; try again shortly."


class DataCommand(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    account: str
    app: str  # id
    action: Action
    ends: float  # seconds since the epoch
    reason: Reason = "manual"  # of the snapshot that the action makes
    deploy: str = ""  # the deploy that the action belongs to
    source: str = ""  # for `restore`: the key of the snapshot; for `forget`: the record of the deletion

    @property
    def is_over(self) -> bool:
        """Returns whether no host carries it out any more."""
        return time.time() > self.ends + COMMAND_SECONDS


class DataAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`error` is for account holders. Without a snapshot and an error, the app has no data."""

    snapshot: Snapshot | None = None
    error: str = ""
    is_full: bool = False  # the error is that of a full disk
    notes: list[str] = []  # what the snapshot lacks
    service_fault: bool = False  # whether the service has failed, not the app


class DataCommands:
    def __init__(self, store: Store) -> None:
        self._store = store

    # -- for those who send commands -------------------------------------------------------------------------

    async def run(
        self,
        account: str,
        app: str,
        action: Action,
        seconds: float,
        *,
        reason: Reason = "manual",
        deploy: str = "",
        source: str = "",
    ) -> DataAnswer:
        """Sends a command and waits for its answer. Raises DataUnavailable and BackboneUnavailable."""
        command = DataCommand(new_id("dat"), account, app, action, time.time() + seconds, reason, deploy, source)
        await self.send(command)
        return await _wait(partial(self._read_answer, command), seconds)

    async def run_for_deploy(
        self, account: str, app: str, action: Action, seconds: float, *, deploy: str, source: str = ""
    ) -> DataAnswer:
        """Does the same for a step of a deploy, and waits for Redis if necessary. Raises DataUnavailable.

        An `undo` is carried out even if it has no answer by then, and is sent without waiting if `seconds` is 0.
        """
        reason: Reason = "restore" if action == "restore" else "deploy"
        ends = time.time() + (KEPT_SECONDS if action == "undo" else seconds)
        command = DataCommand(new_id("dat"), account, app, action, ends, reason, deploy, source)
        await patient(self).send(command)
        return await _wait(partial(patient(self)._read_answer, command), seconds)

    async def _read_answer(self, command: DataCommand) -> DataAnswer | None:
        record = await self._store.get(data_answer_key(command.account, command.id))
        return msgspec.json.decode(record, type=DataAnswer) if record else None

    async def send(self, command: DataCommand) -> None:
        """Raises DataUnavailable while too many commands wait."""
        waiting = await self._list_unfinished(command.account)
        own = sum(each.account == command.account for each in waiting)
        if len(waiting) >= MAX_COMMANDS or own >= MAX_COMMANDS_OF_ACCOUNT:
            raise DataUnavailable
        key = data_commands_key(partition_tag(command.account))
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.hset(key, _field(command), msgspec.json.encode(command).decode())
            pipe.expire(key, KEPT_SECONDS)
            await pipe.execute()

    async def has_unfinished(self, account_id: str) -> bool:
        """Returns whether a host may still carry out a command of the account."""
        return any(command.account == account_id for command in await self._list_unfinished(account_id))

    async def _list_unfinished(self, account_id: str) -> list[DataCommand]:
        """Returns the commands of the account's partition, and removes those that are over."""
        key = data_commands_key(partition_tag(account_id))
        commands = [msgspec.json.decode(record, type=DataCommand) for record in await self._store.client.hvals(key)]
        if over := [_field(command) for command in commands if command.is_over]:
            await self._store.client.hdel(key, *over)
        return [command for command in commands if not command.is_over]

    async def forget_app(self, app: App, records: DataRecords) -> None:
        """Keeps the data of an app that is being deleted. Its host removes them later, even if it is away now."""
        record_id = new_id("del")
        if await records.move_to_deleted(app, record_id):
            ends = time.time() + KEPT_SECONDS
            await self.send(
                DataCommand(new_id("dat"), app.account, app.id, "forget", ends, reason="clear", source=record_id)
            )

    # -- for hosts -------------------------------------------------------------------------------------------

    async def list_commands(self) -> list[DataCommand]:
        """Returns the commands of all accounts, oldest first."""
        found = await self._store.read_each(PARTITION_TAGS, lambda pipe, tag: pipe.hvals(data_commands_key(tag)))
        commands = [msgspec.json.decode(record, type=DataCommand) for records in found for record in records]
        return sorted(commands, key=lambda command: command.id)

    async def answer(self, command: DataCommand, answer: DataAnswer) -> None:
        """Writes the answer, and removes the command."""
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.set(
                data_answer_key(command.account, command.id), msgspec.json.encode(answer).decode(), ex=ANSWER_SECONDS
            )
            pipe.hdel(data_commands_key(partition_tag(command.account)), _field(command))
            await pipe.execute()


async def _wait(read: Callable[[], Awaitable[DataAnswer | None]], seconds: float) -> DataAnswer:
    answer = await until(read, POLL_SECONDS, seconds)
    if answer is None:
        raise DataUnavailable
    return answer


def _field(command: DataCommand) -> str:
    return f"{command.account} {command.id}"
