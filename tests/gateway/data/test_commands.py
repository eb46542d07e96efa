"""Commands to the hosts of apps' data, with a real Redis."""

import itertools
import time

import pytest

from gateway.data.commands import (
    COMMAND_SECONDS,
    MAX_COMMANDS_OF_ACCOUNT,
    DataAnswer,
    DataCommand,
    DataCommands,
    DataUnavailable,
)
from gateway.ids import new_id
from gateway.keys import partition_tag
from gateway.redis.client import Store


def make_command(account: str, seconds: float = 60) -> DataCommand:
    return DataCommand(new_id("dat"), account, "shop", "clear", ends=time.time() + seconds)


async def test_the_commands_of_an_account_leave_room_for_others(store: Store) -> None:
    first, commands = "acc_1", DataCommands(store)
    names = (f"acc_{number}" for number in itertools.count(2))
    second = next(name for name in names if partition_tag(name) == partition_tag(first))
    sent = [make_command(first) for _ in range(MAX_COMMANDS_OF_ACCOUNT)]
    for command in sent:
        await commands.send(command)
    with pytest.raises(DataUnavailable):
        await commands.send(make_command(first))
    await commands.send(make_command(second))
    await commands.answer(sent[0], DataAnswer())
    await commands.send(make_command(first))
    assert [command.account for command in await commands.list_commands()].count(first) == MAX_COMMANDS_OF_ACCOUNT


async def test_commands_that_no_host_takes_make_room(store: Store) -> None:
    """Where no host runs, nobody else removes them."""
    commands, over = DataCommands(store), -COMMAND_SECONDS - 1
    for _ in range(MAX_COMMANDS_OF_ACCOUNT):
        await commands.send(make_command("acc_1", over))
    begun, new = make_command("acc_1", -1), make_command("acc_1")
    for command in (begun, new):
        await commands.send(command)
    left = {command.id for command in await commands.list_commands()}
    assert left == {begun.id, new.id}, "a host may have begun one that has just ended"
