"""Changes of one record by several processes at the same time."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from gateway.errors import BackboneUnavailable, NotFound
from gateway.redis.compare_and_set import Change, change_record
from gateway.redis.scripts import Companion
from tests.support.stores import opened


def set_field(name: str) -> Callable[[str], Awaitable[Change[int]]]:
    async def compute(present: str) -> Change[int]:
        fields = {**json.loads(present or "{}"), name: 1}
        return Change(json.dumps(fields), len(fields))

    return compute


async def test_changes_of_different_fields_all_hold(redis_url: str) -> None:
    async with opened(redis_url) as first, opened(redis_url) as second:
        changes = [change_record(store, "record", set_field(f"{n}")) for n, store in enumerate([first, second] * 10)]
        assert sorted(await asyncio.gather(*changes)) == list(range(1, 21))
        assert json.loads(await first.get("record") or "") == {f"{n}": 1 for n in range(20)}
        await first.client.delete("record")


async def test_a_change_may_remove_the_record_or_leave_it(redis_url: str) -> None:
    async def leave(present: str) -> Change[str]:
        return Change(None, present)

    async def remove(_: str) -> Change[None]:
        return Change("", None)

    async def fail(_: str) -> Change[None]:
        raise NotFound

    async with opened(redis_url) as store:
        await store.client.set("record", "text")
        assert await change_record(store, "record", leave) == "text"
        with pytest.raises(NotFound):
            await change_record(store, "record", fail)
        assert await store.get("record") == "text"
        await change_record(store, "record", remove)
        assert await store.get("record") is None
        assert await change_record(store, "record", leave) == ""


async def test_a_second_key_that_changes_meanwhile_is_read_again(redis_url: str) -> None:
    read = []

    async with opened(redis_url) as store:

        async def compute(_: str) -> Change[None]:
            present = await store.get("{p09}:companion") or ""
            read.append(present)
            if present != "other":  # another process, which leaves the record as it is
                await store.client.set("{p09}:companion", "other", ex=60)
            return Change("new", None, Companion("{p09}:companion", f"{present} and mine", 60, expected=present))

        await change_record(store, "{p09}:record", compute)
        assert read == ["", "other"]
        assert await store.get_all(["{p09}:record", "{p09}:companion"]) == ["new", "other and mine"]
        await store.client.delete("{p09}:record")


async def test_endless_contention_fails_with_the_subject(redis_url: str) -> None:
    calls: list[str] = []

    async def compute(present: str) -> Change[None]:
        calls.append(present)
        await store.client.set("record", f"other {len(calls)}", ex=60)
        return Change("mine", None)

    async with opened(redis_url) as store:
        with pytest.raises(BackboneUnavailable, match="Several requests are changing the switch"):
            await change_record(store, "record", compute, subject="the switch", attempts=3)
    assert calls == ["", "other 1", "other 2"]
