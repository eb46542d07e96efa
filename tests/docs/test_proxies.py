"""The proxies of docs/install.md, each run with the configuration that the page shows."""

import asyncio
import contextlib
import itertools
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import DONE, chunk
from tests.fakes.server import HANG, Step, answer
from tests.support import programs
from tests.support.accounts import App
from tests.support.gateway_process import Gateway, gateway_with_redis
from tests.support.polling import wait_until
from tests.support.raw_http import request, send
from tests.support.redis_servers import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
SECRET = "dpl_secret-in-the-path"
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}
pytestmark = pytest.mark.asyncio(loop_scope="session")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def nginx(port: int, gateway_port: int, folder: Path) -> tuple[str, list[str]]:
    server = f"listen 127.0.0.1:{port}; {at(block('nginx'), gateway_port)}"
    temporary = " ".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    options = f"daemon off; master_process off; pid {folder}/pid; error_log stderr;"
    configuration = f"{options} events {{}} http {{ {temporary} access_log /dev/stderr; server {{ {server} }} }}"
    return configuration, ["nginx", "-e", "stderr", "-p", str(folder), "-c"]


def nginx_with_upgrades(port: int, gateway_port: int, folder: Path) -> tuple[str, list[str]]:
    """Configures nginx as Kubernetes controllers do for applications with WebSockets."""
    configuration, command = nginx(port, gateway_port, folder)
    documented = 'proxy_set_header Connection "";'
    assert documented in configuration
    passed_on = (
        "proxy_request_buffering off; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade;"
    )
    return configuration.replace(documented, passed_on), command


def caddy(port: int, gateway_port: int, _: Path) -> tuple[str, list[str]]:
    text = at(block("caddyfile"), gateway_port).replace("api.example.com", f"http://127.0.0.1:{port}")
    return text.replace("{\n", "{\nadmin off\n", 1), ["caddy", "run", "--adapter", "caddyfile", "--config"]


def at(text: str, gateway_port: int) -> str:
    assert text.count("127.0.0.1:8000") == 1
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{gateway_port}")


@contextlib.asynccontextmanager
async def running(proxy: str, port: int, gateway_port: int, folder: Path) -> AsyncIterator[Path]:
    """Runs the proxy and yields the file with all its output."""
    programs.require(proxy.partition(" ")[0])
    configure = {"nginx": nginx, "nginx with upgrades": nginx_with_upgrades, "caddy": caddy}[proxy]
    configuration, command = configure(port, gateway_port, folder)
    (folder / "configuration").write_text(configuration)
    log = folder / "log"
    environment = {"PATH": f"{os.environ['PATH']}:/usr/sbin", "HOME": str(folder)}
    with programs.running(*command, folder / "configuration", log=log, env=environment) as process:
        await wait_until(lambda: process.poll() is not None or listens(port), 30)
        assert process.poll() is None, log.read_text()
        yield log


async def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """Yields an app of a gateway whose public address is that of a proxy which does not run yet."""
    address, folder = f"http://127.0.0.1:{free_port()}", tmp_path_factory.mktemp("proxied")
    async with (
        FakeProvider() as provider,
        FakeAppBackend() as backend,
        gateway_with_redis(provider, folder, GATEWAY_BASE_URL=address) as gateway,
    ):
        yield await gateway.app(backend)


@pytest.fixture
def public(app: App) -> Iterator[Gateway]:
    """Sends the tests' requests to the proxy."""
    direct = app.gateway.http.base_url
    app.gateway.http.base_url = httpx.URL(app.gateway.environment["GATEWAY_BASE_URL"])
    yield app.gateway
    app.gateway.http.base_url = direct


@pytest.mark.parametrize("proxy", ["nginx", "caddy"])
async def test_a_documented_proxy(proxy: str, app: App, public: Gateway, tmp_path: Path) -> None:
    port = public.http.base_url.port
    assert port
    async with running(proxy, port, public.port, tmp_path) as log:
        await tokens_arrive_one_by_one(app)
        await a_client_that_leaves_ends_the_request(app)
        response = await public.http.post(
            "/mcp",
            json=INITIALIZE,
            headers={"Authorization": f"Bearer {app.account.key}", "Accept": "application/json, text/event-stream"},
        )
        assert response.status_code == 200, response.text
        assert "serverInfo" in response.text
        for path in ("health", "ready", "metrics"):
            for spelling in (path, f"{path}/", f"/{path}", f"%{ord(path[0]):x}{path[1:]}", f"{path}?a"):
                response = await public.http.get(f"{public.environment['GATEWAY_BASE_URL']}/{spelling}")
                assert response.status_code == 404, spelling
        assert (await public.http.post(f"/hooks/deploy/{SECRET}")).status_code == 404
    assert SECRET not in log.read_text()


async def tokens_arrive_one_by_one(app: App) -> None:
    """Checks that each token arrives before the provider sends the next one."""
    words = [" one", " two", " three"]
    seen = [asyncio.Event() for _ in words]
    steps = [step for word, event in zip(words, seen, strict=True) for step in (chunk(word), event)]
    prompt = app.gateway.provider.plays(*steps, chunk(finish="stop"), chunk(usage=(7, 3)), DONE)
    got = []
    async with app.stream(prompt) as source:
        async for event in source.aiter_sse():
            got.append(event.event)
            if event.event == "message":
                seen[len(got) - 1].set()
    assert got == ["message"] * 3 + ["done"]


async def a_client_that_leaves_ends_the_request(app: App) -> None:
    prompt = app.gateway.provider.plays(chunk(" one"), HANG)
    async with app.stream(prompt) as source:
        await anext(source.aiter_sse())
    (exchange,) = app.gateway.provider.asked(prompt)
    await asyncio.wait_for(exchange.canceled.wait(), 10)


@pytest.mark.parametrize("proxy", ["nginx", "caddy"])
async def test_no_secret_is_logged_while_the_gateway_is_down(proxy: str, tmp_path: Path) -> None:
    port = free_port()
    async with running(proxy, port, free_port(), tmp_path) as log, httpx.AsyncClient(trust_env=False) as client:
        response = await client.post(f"http://127.0.0.1:{port}/hooks/deploy/{SECRET}")
        assert response.status_code == 502
    assert SECRET not in log.read_text()


@pytest.mark.parametrize("proxy", ["nginx", "nginx with upgrades", "caddy"])
async def test_no_account_reads_the_answers_of_another(proxy: str, app: App, public: Gateway, tmp_path: Path) -> None:
    """A request for an upgrade whose body is another request does not shift the answers on the proxy's connection.

    The attacker's own backend keeps the gateway waiting, so that the proxy sends the body before it has an answer.
    """
    port = public.http.base_url.port
    assert port
    async with running(proxy, port, public.port, tmp_path), FakeAppBackend() as slow:
        slow.refresh = [0.3, *answer(200, {"record": {"id": "ana"}})]
        auth = {"kind": "backend", "url": slow.refresh_url, "method": "POST", "userField": "record.id"}
        attacker, victim = await public.app(slow, auth=auth), await public.app(app.backend)
        smuggled = public.provider.plays(*short_answer("of the attacker"))
        inner = request(attacker.path, json.dumps({"prompt": smuggled}).encode(), bearing(slow))
        # Servers skip line breaks before a request. So many fill the proxy's buffer, and what follows comes later.
        parts = [b"\r\n" * 5_000, inner]
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]
        framings = {f"Content-Length: {sum(map(len, parts))}": parts, "Transfer-Encoding: chunked": chunks}
        for number, (protocol, framing) in enumerate(itertools.product(("h2c", "websocket", "anything"), framings)):
            headers = ["Connection: Upgrade", f"Upgrade: {protocol}", framing]
            head = request(attacker.path, b"", bearing(slow, f"user {number}"), *headers)
            head = head.replace(b"Host: gateway", f"Host: 127.0.0.1:{port}".encode())  # Caddy serves no other
            sent = framings[framing]
            with contextlib.suppress(TimeoutError):
                await send(port, head + sent[0], *sent[1:], pause=0.1, timeout=2)
            text = f"private {number}"
            assert (await victim.ask(public.provider.plays(*short_answer(text)))).json()["text"] == text, headers
        assert public.provider.asked(smuggled) == []


def short_answer(text: str) -> list[Step]:
    return [chunk(text), chunk(finish="stop"), chunk(usage=(1, 1)), DONE]


def bearing(backend: FakeAppBackend, user: str = "ana") -> str:
    return f"Authorization: Bearer {backend.token(user)}"
