"""The shared connection to Redis, with a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from gateway.inference.spend import scripts
from gateway.redis.pipeline import Pipeline
from tests.support.stores import opened


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(url, 0.5)
    try:
        yield pipeline
    finally:
        await pipeline.close()


async def test_each_caller_gets_its_own_answer_or_error(redis_url: str) -> None:
    async with connected(redis_url) as pipeline:
        answers = await asyncio.gather(*[pipeline.call("ECHO", f"{n}é") for n in range(500)])
        assert answers == [f"{n}é" for n in range(500)]
        leaving = [asyncio.ensure_future(pipeline.call("ECHO", "gone")) for _ in range(10)]
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        calls = (pipeline.call("ECHO", "mine"), pipeline.call("NONSENSE"), pipeline.call("PING"))
        mine, bad, good = await asyncio.gather(*calls, return_exceptions=True)
        assert (mine, type(bad), good) == ("mine", ResponseError, "PONG")


async def test_every_call_fails_when_the_server_stops_answering() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, connected(f"redis://127.0.0.1:{port}/0") as pipeline:
        calls = [asyncio.ensure_future(pipeline.call("PING")) for _ in range(5)]
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 3)
        assert [type(e) for e in ended] == [RedisConnectionError] * 5


async def test_a_script_the_server_forgot_is_sent_again(redis_url: str) -> None:
    async with opened(redis_url) as store:
        for _ in range(2):
            assert await scripts.list_expired_reservations(store, "{p09}", 5) == []
            await store.client.script_flush()
