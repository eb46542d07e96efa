"""Commands to the hosts of apps' data, with a real Redis."""

import itertools

import pytest

from gateway.data.commands import MAX_COMMANDS_OF_ACCOUNT, DataAnswer, DataCommand, DataCommands, DataUnavailable
from gateway.ids import new_id
from gateway.keys import partition_tag
from gateway.redis.client import Store


def make_command(account: str) -> DataCommand:
    return DataCommand(new_id("dat"), account, "shop", "clear", ends=0)


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
