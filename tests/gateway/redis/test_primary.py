"""A primary that is replaced while the connections to it still work."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.inference.spend.admission import Admission, Reservation
from gateway.inference.spend.reservations import ReservationRecord
from gateway.keys import spend_key
from gateway.redis.client import Store
from gateway.redis.primary import NEWEST_SECONDS, Sentinels
from gateway.redis.scripts import increment_counters
from gateway.settings import Settings
from gateway.settings.prices import TARIFFS
from gateway.telemetry.metrics import Metrics
from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy
from tests.support.virtual_time import virtual_time


class Move:
    """An address whose server changes. The connections to the former server stay open, and it still accepts writes."""

    def __init__(self, successor: RedisServer, address: Proxy) -> None:
        self.successor, self._address = successor, address
        self.store = Store(address.url)

    def happen(self) -> None:
        self._address.target = self.successor.port

    async def write(self, key: str) -> None:
        """Writes over both kinds of connection."""
        await increment_counters(self.store, "{p09}:tests", "hash", 60, {"calls": 1})
        await self.store.client.set(key, "1", ex=60)


@pytest.fixture
async def move() -> AsyncIterator[Move]:
    former, successor = RedisServer().start(), RedisServer().start()
    async with Proxy(former.port) as address:
        move = Move(successor, address)
        yield move
        await move.store.close()
    former.stop()
    successor.stop()


async def test_one_address_whose_server_changes(move: Move) -> None:
    changes: list[float] = []
    move.store.on_change(lambda: changes.append(time.monotonic()))
    await move.write("a")
    move.happen()
    await wait_until(lambda: changes, 5)
    await move.write("b")
    with move.successor.client() as client:
        assert client.hget("{p09}:tests", "calls") == b"1"
        assert client.exists("b")
    assert len(changes) == 1


async def test_settlements_that_a_former_primary_confirmed_are_repeated(move: Move) -> None:
    admission = Admission(Settings(), move.store, Metrics({}))
    day = time.strftime("%Y-%m-%d", time.gmtime())
    record = ReservationRecord("account", day, 500, int(time.time() * 1000) + 60_000, "app", "")
    repeating = asyncio.create_task(admission.repeat_recent())
    await admission.settle(Reservation("r1", "account", 500, TARIFFS[0], record), 120)
    move.happen()
    with move.successor.client() as client:
        await wait_until(lambda: client.hget(spend_key("account", day), "settled") == b"120")
    await cancel(repeating)


class Answers:
    """A Sentinel with the epoch of its configuration, the primary in its state, and the one that it names."""

    def __init__(self, epoch: int, knows: int, names: int, *, down: bool = False, dead: bool = False) -> None:
        self.dead = dead
        state = {"ip": "10.0.0.1", "port": knows, "is_master": True, "is_sdown": down, "is_odown": down}
        self.answers = [{**state, "config-epoch": epoch}, ("10.0.0.1", names)]

    def pipeline(self, **_: Any) -> "Answers":
        return self

    async def __aenter__(self) -> "Answers":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def execute_command(self, *_: Any, **__: Any) -> None:
        pass

    async def execute(self) -> list[Any]:
        if self.dead:
            raise RedisConnectionError
        return self.answers


@pytest.mark.parametrize(
    ("answers", "port"),
    [
        ([Answers(4, 1, 1), Answers(4, 1, 1)], 1),
        ([Answers(3, 1, 1), Answers(4, 2, 2)], 2),  # the first was partitioned
        ([Answers(4, 2, 2), Answers(4, 2, 1)], 1),  # the second leads a switchover
        ([Answers(4, 1, 1, dead=True), Answers(4, 2, 2)], 2),
        ([Answers(4, 1, 1, down=True), Answers(4, 1, 1, dead=True)], None),
    ],
)
async def test_the_sentinel_with_the_newest_configuration_is_trusted(answers: list[Answers], port: int | None) -> None:
    sentinels = Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = answers
    if port is None:
        with pytest.raises(MasterNotFoundError):
            await sentinels.discover_master("main")
    else:
        assert await sentinels.discover_master("main") == ("10.0.0.1", port)


@virtual_time
async def test_an_older_configuration_is_not_trusted_after_a_newer_one() -> None:
    """For a while: Sentinels that were set up again begin with the first configuration."""
    sentinels = Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = [Answers(4, 1, 2)]
    assert await sentinels.discover_master("main") == ("10.0.0.1", 2)
    sentinels.sentinels = [Answers(4, 1, 1)]  # it has not heard of the switchover yet
    assert await sentinels.discover_master("main") == ("10.0.0.1", 2)
    await asyncio.sleep(NEWEST_SECONDS + 1)
    assert await sentinels.discover_master("main") == ("10.0.0.1", 1)
