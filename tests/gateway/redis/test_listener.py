"""A listener that loses its subscription and gets it back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.redis.listener import Listener
from tests.support.background import in_background
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened


@asynccontextmanager
async def listening(url: str, **options: Any) -> AsyncIterator[list[str]]:
    """Runs a listener to two channels, and yields what it has reported."""
    reports = list[str]()
    async with opened(url, **options) as store:
        listener = Listener(
            store,
            "one",
            "two",
            on_subscribe=lambda: reports.append("subscribed"),
            on_message=lambda channel, text: reports.append(f"{channel}: {text}"),
            on_loss=lambda: reports.append("lost"),
            loss_event="tests.lost",
        )
        async with in_background(listener.run()):
            await wait_until(lambda: "subscribed" in reports)
            yield reports


async def test_messages_arrive_and_a_canceled_listener_reports_the_loss(redis_url: str, valkey: RedisServer) -> None:
    async with listening(redis_url) as reports:
        with valkey.client() as client:
            client.publish("two", "hello")
            client.publish("one", "again")
        await wait_until(lambda: len(reports) == 3)
        assert reports == ["subscribed", "two: hello", "one: again"]
    assert reports[3:] == ["lost"]


async def test_a_broken_connection_is_reported_and_replaced(redis_url: str, valkey: RedisServer) -> None:
    async with listening(redis_url) as reports:
        for _ in range(3):
            reports.clear()
            with valkey.client() as client:
                client.client_kill_filter(_type="pubsub")
            await wait_until(lambda: reports == ["lost", "subscribed"], 2)
            with valkey.client() as client:
                client.publish("one", "later")
            await wait_until(lambda: reports[2:] == ["one: later"])


async def test_a_silent_server_counts_as_lost(redis_url: str, valkey: RedisServer) -> None:
    async with listening(redis_url, command_seconds=0.5) as reports:
        valkey.freeze()
        try:
            await wait_until(lambda: "lost" in reports, 2)
        finally:
            valkey.thaw()
        await wait_until(lambda: reports[-1] == "subscribed", 4)
