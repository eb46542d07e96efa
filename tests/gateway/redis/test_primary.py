"""A primary that another server replaces while the connections to it live."""

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.inference.keys import spend_key
from gateway.inference.spend.admission import Admission, Reservation
from gateway.inference.spend.reservations import ReservationRecord
from gateway.redis.client import Store
from gateway.redis.primary import Sentinels
from gateway.redis.scripts import increment
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.tcp_proxy import Proxy


async def test_one_address_whose_server_changes() -> None:
    """Nothing ends the connections to the former server, which takes writes as before."""
    former, successor = RedisServer().start(), RedisServer().start()
    try:
        async with Proxy(former.port) as address:
            store = Store(address.url)
            changes: list[float] = []
            store.on_change(lambda: changes.append(time.monotonic()))
            try:
                await increment(store, "{p09}:tests", "hash", 60, {"calls": 1})
                await store.client.set("a", "1", ex=60)
                address.target = successor.port
                await wait_until(lambda: changes, 5)
                await increment(store, "{p09}:tests", "hash", 60, {"calls": 1})
                await store.client.set("b", "1", ex=60)
                with successor.client() as client:
                    assert client.hget("{p09}:tests", "calls") == b"1"
                    assert client.exists("b")
                assert len(changes) == 1
            finally:
                await store.close()
    finally:
        former.stop()
        successor.stop()


async def test_what_a_former_primary_confirmed_is_settled_again() -> None:
    former, successor = RedisServer().start(), RedisServer().start()
    try:
        async with Proxy(former.port) as address:
            store, settings = Store(address.url), Settings()
            admission = Admission(settings, store, Metrics({}))
            now = int(time.time() * 1000)
            day = time.strftime("%Y-%m-%d", time.gmtime())
            record = ReservationRecord("account", day, 500, now + 60_000, "app", "")
            repeating = asyncio.create_task(admission.repeat_recent())
            try:
                await admission.settle(Reservation("r1", "account", 500, record), 120)
                address.target = successor.port
                spend = spend_key("account", day)

                def settled() -> bool:
                    with successor.client() as client:
                        return client.hget(spend, "settled") == b"120"

                await wait_until(settled, 5)
            finally:
                repeating.cancel()
                await asyncio.gather(repeating, return_exceptions=True)
                await store.close()
    finally:
        former.stop()
        successor.stop()


class Answers:
    """One Sentinel: its configuration's epoch, the primary it knows, the one it names."""

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
        ([Answers(4, 1, 1), Answers(4, 1, 1), Answers(4, 1, 1)], 1),
        ([Answers(3, 1, 1), Answers(4, 2, 2)], 2),  # the first was cut off
        ([Answers(4, 1, 1), Answers(4, 1, 2)], 2),  # the second leads a switchover
        ([Answers(4, 1, 1, dead=True), Answers(4, 2, 2)], 2),
        ([Answers(4, 1, 1, down=True), Answers(4, 1, 1, down=True)], None),
        ([Answers(4, 1, 1, dead=True)], None),
    ],
)
async def test_the_sentinel_with_the_newest_configuration_is_believed(answers: list[Answers], port: int | None) -> None:
    sentinels = Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = answers
    if port is None:
        with pytest.raises(MasterNotFoundError):
            await sentinels.discover_master("main")
    else:
        assert await sentinels.discover_master("main") == ("10.0.0.1", port)
