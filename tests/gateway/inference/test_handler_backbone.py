"""Redis fails and returns: the gateway refuses requests, loses no money, and recovers by itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, ROLE, chunk, tokens
from tests.fakes.server import HANG
from tests.support.accounts import App
from tests.support.gateway_process import Gateway, gateway
from tests.support.key_leaks import assert_no_leak
from tests.support.polling import PATIENCE_SECONDS, wait_until
from tests.support.prices import cost, max_cost
from tests.support.redis_servers import RedisServer
from tests.support.responses import answered, refused, text_of
from tests.support.tcp_proxy import Proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")


@contextlib.asynccontextmanager
async def durable(provider: FakeProvider, folder: Path) -> AsyncIterator[Gateway]:
    """A gateway with a Redis that persists its data."""
    with RedisServer(folder=folder) as server:
        async with gateway(server.url, provider, folder) as gw:
            gw.redis = server
            yield gw
        with server.client() as client:
            assert_no_leak(client)


async def heals(app: App) -> None:
    async def works() -> bool:
        return (await app.ask("x", token=app.token("patient"))).status_code == 200

    await wait_until(works, 5, 0.2)


async def settles(app: App) -> int:
    async def at_rest() -> dict | None:
        spend = await app.account.spend()
        return None if spend["reserved"] else spend

    return (await wait_until(at_rest, 15, 0.1))["settled"]


def command(line: str) -> Callable[[Gateway], None]:
    """Returns what sends Redis a command."""

    def send(gw: Gateway) -> None:
        with gw.redis.client() as client:
            client.execute_command(*line.encode().split())

    return send


KILLED = "killed"
# What happens to Redis, and what mends it.
STATES: dict[str, tuple[Callable[[Gateway], None], Callable[[Gateway], None]]] = {
    KILLED: (lambda gw: gw.redis.kill(), lambda gw: gw.redis.start()),
    # It refuses writes, as without memory, or as a replica after a failover.
    "OOM": (command("CONFIG SET maxmemory 1"), command("CONFIG SET maxmemory 0")),
    "READONLY": (command("REPLICAOF 127.0.0.1 1"), command("REPLICAOF NO ONE")),
    "NOREPLICAS": (command("CONFIG SET min-replicas-to-write 1"), command("CONFIG SET min-replicas-to-write 0")),
}


async def test_redis_fails_and_returns(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    async with durable(provider, tmp_path) as gw:
        app, gate = await gw.app(backend), asyncio.Event()
        rest = [chunk("ten"), chunk(finish="stop"), chunk(usage=(3, 2)), DONE]
        for state, (fail, mend) in STATES.items():
            running = provider.plays(ROLE, chunk("Gu"), gate, rest)
            leaving = provider.plays(ROLE, chunk("a"), HANG)
            gate.clear()
            spent = await app.account.settled()
            async with app.stream(running) as source, contextlib.AsyncExitStack() as stack:
                events = source.aiter_sse()
                heard = [await anext(events)]
                other = await stack.enter_async_context(app.stream(leaving))
                others = other.aiter_sse()  # kept, since the garbage collector would close it
                await anext(others)
                fail(gw)
                await refuses_everything(gw, app, provider, state)
                # A running stream continues and an abandoned one is canceled. Neither can be settled yet.
                gate.set()
                heard += [e async for e in events]
                assert (text_of(heard), heard[-1].event) == ("Guten", "done")
                await stack.aclose()
                await asyncio.wait_for(provider.asked(leaving)[0].canceled.wait(), PATIENCE_SECONDS)
            mend(gw)
            await wait_until(lambda: gw.answers("/ready"), 5)
            assert await settles(app) == spent + cost(3, 2) + max_cost(leaving)
            await heals(app)


async def refuses_everything(gw: Gateway, app: App, provider: FakeProvider, state: str) -> None:
    prompt = provider.plays(tokens("x"))
    chat = {"model": "gpt-oss-120b", "messages": [{"role": "user", "content": prompt}]}
    for response in (
        await app.ask(prompt),
        await app.ask(prompt, stream=True),
        await app.post(chat, path="/chat/completions"),
    ):
        refused(response, 503, "BACKBONE_UNAVAILABLE")
        assert int(response.headers["Retry-After"]) >= 1
    assert provider.asked(prompt) == []
    created = await gw.platform("POST", "accounts", {"name": "x", "plan": "free"})
    refused(created, 503, "BACKBONE_UNAVAILABLE")
    assert (await gw.http.get("/health")).status_code == 200
    not_ready = refused(await gw.http.get("/ready"), 503, "BACKBONE_UNAVAILABLE")
    assert "\ngateway_redis_up 0.0" in (await gw.http.get("/metrics")).text
    if state == KILLED:
        # An app whose record no process has cached.
        stranger = App(app.account, "never-seen", app.backend)
        refused(await stranger.ask(prompt), 503, "BACKBONE_UNAVAILABLE")
        refused(await app.account.get(), 503, "BACKBONE_UNAVAILABLE")
        refused(await app.account.get("/account/apps"), 503, "BACKBONE_UNAVAILABLE")
    else:
        assert f"({state})" in not_ready["message"]
        for event in ("redis.unavailable", "admission.failed"):
            assert any(event in line and f'"{state}"' in line for line in gw.log.splitlines()), state


async def test_redis_slow(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    """Requests take longer, but succeed. So no gateway leaves the load balancer, which all would at the same time."""
    with RedisServer() as server:
        async with Proxy(server.port) as proxy, gateway(proxy.url, provider, tmp_path) as gw:
            app = await gw.app(backend)
            proxy.delay, proxy.hold_requests = 0.8, b"SUBSCRIBE"
            await wait_until(lambda: '"registry.lost"' in gw.log)  # the subscription to changes is silent for too long
            answered(await app.ask("x"))
            assert (await gw.http.get("/ready")).json() == {"status": "ready"}
            proxy.let_go()  # answers stay slow, because a quick one could overtake another on its way through the proxy


async def test_a_start_before_redis(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    """The gateway may start before Redis: it is not ready at first, and recovers."""
    server = RedisServer(folder=tmp_path)
    try:
        async with gateway(server.url, provider, tmp_path) as gw:
            assert (await gw.http.get("/ready")).status_code == 503
            assert '"reason":"Redis is not running"' in gw.log
            server.start()
            await wait_until(lambda: gw.answers("/ready"), 5)
            answered(await (await gw.app(backend)).ask("x"))
    finally:
        server.stop()
