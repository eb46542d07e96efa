"""Services that are away, slow, unknown or wrong: one line on stderr, never a traceback."""

import asyncio
import signal
import ssl
from pathlib import Path
from typing import Any

import pytest

from capsule_gateway.cli import service as calls
from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import CLOSE, HANG, FakeServer, Head, Raw, answer
from tests.support.command_line import Tool, start_process
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEFAULTS = calls.Service.request_object.__kwdefaults__
COMMANDS = """
account
hooks create shop --name ci
webhooks show
webhooks set https://example.com
deliveries list
deliveries show evt_1
deliveries redeliver --failed --since 1h
keys create ci
deploys list
deploys show dep_1
deploys show dep_1 --follow --timeout 1
apps list
apps show shop
inference status
"""
STRANGE: list[Any] = [
    *(None, 7, [], {}, [1, 2], [{}]),
    [{"id": 1, "createdAt": 5, "durationMs": "long", "state": {}, "log": []}],
    {"limits": 5, "spend": [1], "log": 7, "state": ["live"], "durationMs": {}, "secret": 1, "url": None},
    {"name": "\x1b[2J\ud800\u202e[bold]", "state": "live", "log": "\x1b]0;title\x07\ud800"},
    [{"name": "\x1b[2J\ud800[/]", "id": "x" * 5000, "createdAt": "9999-99-99", "lastUsedAt": "yesterday"}],
    {"error": {"code": None}},
    *(b"<html>It works!</html>", b"", b"[" * 100_000, b"\xff\xfe"),
]


@pytest.mark.usefixtures("quick_follow")
@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body)[:30])
async def test_strange_answers(stubbed: Tool, service: Service, body: Any) -> None:
    service.replies = [answer(200, body)]
    for command in COMMANDS.strip().splitlines():
        run = await stubbed(*command.split())
        assert run.code in (0, 1)
        assert "None\n" not in run.out
        assert "\x1b" not in run.out + run.err
    service.replies = [answer(500, body)]
    assert "answered 500" in await stubbed.refused("hooks", "list")


async def test_no_service_at_the_address(tmp_path: Path) -> None:
    capsule = Tool(f"http://127.0.0.1:{free_port()}", "csk_key", tmp_path)
    assert "cannot reach http://127.0.0.1:" in await capsule.refused("account")


async def test_a_certificate_that_nobody_trusts(tls: tuple[ssl.SSLContext, str], tmp_path: Path) -> None:
    async with FakeServer(tls[0]) as server:
        server.reply = answer(200, [])
        capsule = Tool(server.address.replace("http:", "https:"), "csk_key", tmp_path)
        assert "certificate of https://127.0.0.1:" in await capsule.refused("keys", "list", SSL_CERT_FILE=None)
        assert (await capsule("keys", "list", SSL_CERT_FILE=tls[1])).code == 0


async def test_invalid_responses(stubbed: Tool, service: Service) -> None:
    elsewhere = "https://elsewhere.example.com/account"
    for script, message in (
        ([CLOSE], "the connection to"),
        ([Raw(b"SSH-2.0-OpenSSH\r\n"), CLOSE], "the connection to"),
        ([Head(200, {"Content-Length": "50"}), b"{", CLOSE], "the connection to"),
        (answer(301, b"", {"Location": elsewhere}), f"redirects to {elsewhere}"),
        (answer(502, b"<html>Bad Gateway</html>"), "answered 502"),
        (answer(200, b"{}", {"Content-Encoding": "gzip"}), "the connection to"),
    ):
        service.replies = [script]
        assert message in await stubbed.refused("account")


async def test_no_answer_in_time(stubbed: Tool, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.Service.request_object, "__kwdefaults__", {**DEFAULTS, "seconds": 0.2})
    service.replies = [[HANG]]
    assert "did not answer in time" in await stubbed.refused("account")


async def test_an_error_shows_the_retry_time(stubbed: Tool, service: Service) -> None:
    error = {"code": "DEPLOY_QUOTA_REACHED", "message": "Used up.\nCome back.", "requestId": "abc"}
    service.replies = [answer(429, {"error": error}, {"Retry-After": "90"})]
    message = await stubbed.refused("account")
    assert message == "Used up. Come back. (DEPLOY_QUOTA_REACHED, retry after 90 s, request abc)"


async def test_a_bad_address(tmp_path: Path) -> None:
    for url in ("example.com", "ftp://example.com", "http://", "http://[::1", "http://u:p@host", "https://host/?a=b"):
        assert "is not an address" in await Tool(url, "csk_key", tmp_path).refused("account", code=2)
    refused = await Tool("", "", tmp_path).refused("login", "--url", "ü\x00", given="csk\n", code=2)
    assert "is not an address" in refused  # no environment can hold this one


async def test_an_invalid_key(service: Service, tmp_path: Path) -> None:
    for key in ("csk_ä", "csk_ 1", "csk_\x07"):
        assert "copy it again" in await Tool(service.address, key, tmp_path).refused("account", code=2)
    assert not service.exchanges


async def test_a_proxy_that_cannot_be_used(stubbed: Tool) -> None:
    proxies = {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    assert "proxy" in await stubbed.refused("account", code=2, **proxies)


async def interrupted(tool: Tool, service: Service, *command: str) -> tuple[str, str]:
    """Runs a command, sends Ctrl-C while it waits for the service, and returns its output."""
    process = start_process(tool, *command)
    await wait_until(lambda: service.exchanges)
    process.send_signal(signal.SIGINT)
    written = await asyncio.to_thread(process.communicate, timeout=10)
    assert process.returncode == 130
    return written


async def test_ctrl_c(stubbed: Tool, service: Service) -> None:
    """While a deploy is followed, it says that the deploy continues."""
    service.replies = [[HANG]]
    out, err = await interrupted(stubbed, service, "account")
    assert out + err.strip() == ""
    service.exchanges.clear()
    service.replies = [answer(200, {"id": "dep_1", "state": "queued", "log": ""})]
    _, err = await interrupted(stubbed, service, "deploys", "show", "dep_1", "--follow")
    assert err.strip() == "The deploy continues. Follow it again with: capsule deploys show dep_1 --follow"


async def test_a_reader_that_leaves(stubbed: Tool, service: Service) -> None:
    service.replies = [answer(200, [{"name": "n" * 100, "id": str(i)} for i in range(20_000)])]
    with start_process(stubbed, "hook", "list", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert await asyncio.to_thread(process.stdout.read, 10) == '[{"name": '
        process.stdout.close()
        assert await asyncio.to_thread(process.stderr.read) == ""


async def test_requests_carry_the_key_and_quoted_names(stubbed: Tool, service: Service) -> None:
    await stubbed("hooks", "remove", "a/b?c")
    assert service.calls == ["DELETE /account/hooks/a%2Fb%3Fc"]
    assert service.exchanges[0].header("authorization") == "Bearer csk_key"
