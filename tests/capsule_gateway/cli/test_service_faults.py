"""Services that are away, slow, unknown or wrong: one line on stderr, never a traceback."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from capsule_gateway.cli import service
from tests.fakes.server import CLOSE, HANG, FakeServer, Head, Raw, Script, answer
from tests.support.command_line import Tool
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMANDS = [
    ["account"],
    ["hooks", "create", "shop", "--name", "ci"],
    ["hooks", "list"],
    ["hooks", "remove", "hook_1"],
    ["webhooks", "show"],
    ["webhooks", "set", "https://example.com"],
    ["webhooks", "remove"],
    ["webhooks", "test", "app.crashed"],
    ["deliveries", "list"],
    ["deliveries", "show", "evt_1"],
    ["deliveries", "redeliver", "evt_1"],
    ["deliveries", "redeliver", "--failed", "--since", "1h"],
    ["webhooks", "rotate"],
    ["keys", "list"],
    ["keys", "create", "ci"],
    ["keys", "remove", "key_1"],
    ["deploys", "list"],
    ["deploys", "show", "dep_1"],
    ["deploys", "show", "dep_1", "--follow", "--timeout", "1"],
    ["apps", "list"],
    ["apps", "show", "shop"],
    ["apps", "remove", "shop", "--yes"],
    ["accounts", "create", "Vreni"],
    ["accounts", "plan", "acc_1", "max"],
    ["accounts", "create-key", "acc_1", "ci"],
    ["inference", "status"],
]
STRANGE: list[Any] = [
    None,
    7,
    "yes",
    [],
    {},
    [1, 2],
    [{}],
    [{"id": 1, "createdAt": 5, "durationMs": "long", "state": {}, "log": []}],
    {"limits": 5, "spend": [1], "log": 7, "state": ["live"], "durationMs": {}, "secret": 1, "url": None},
    {"name": "\x1b[2J\ud800\u202e[bold]", "state": "live", "log": "\x1b]0;title\x07\ud800"},
    [{"name": "\x1b[2J\ud800[/]", "id": "x" * 5000, "createdAt": "9999-99-99", "lastUsedAt": "yesterday"}],
    {"error": {"code": None}},
    b"<html>It works!</html>",
    b"",
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest_asyncio.fixture(loop_scope="session")
async def odd() -> AsyncIterator[FakeServer]:
    async with FakeServer() as server:
        yield server


@pytest.fixture
def capsule(odd: FakeServer, tmp_path: Path, quick_follow: None) -> Tool:
    return Tool(odd.address, "csk_key", tmp_path)


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body)[:30])
async def test_strange_answers(capsule: Tool, odd: FakeServer, body: Any) -> None:
    odd.reply = answer(200, body)
    for command in COMMANDS:
        run = await capsule(*command)
        assert run.code in (0, 1)
        assert "None\n" not in run.out
        assert "\x1b" not in run.out + run.err
    odd.reply = answer(500, body)
    assert "answered 500" in await capsule.refused("hooks", "list")


async def test_no_service_at_the_address(tmp_path: Path) -> None:
    capsule = Tool(f"http://127.0.0.1:{free_port()}", "csk_key", tmp_path)
    assert "cannot reach http://127.0.0.1:" in await capsule.refused("account")


async def test_a_certificate_that_nobody_trusts(tls: tuple[ssl.SSLContext, str], tmp_path: Path) -> None:
    async with FakeServer(tls[0]) as server:
        server.reply = answer(200, [])
        capsule = Tool(server.address.replace("http:", "https:"), "csk_key", tmp_path)
        assert "certificate of https://127.0.0.1:" in await capsule.refused("keys", "list", SSL_CERT_FILE=None)
        assert (await capsule("keys", "list", SSL_CERT_FILE=tls[1])).code == 0


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([CLOSE], "the connection to"),
        ([Raw(b"SSH-2.0-OpenSSH\r\n"), CLOSE], "the connection to"),
        ([Head(200, {"Content-Length": "50"}), b"{", CLOSE], "the connection to"),
        (
            answer(301, b"", {"Location": "https://elsewhere.example.com/account"}),
            "redirects to https://elsewhere.example.com",
        ),
        (answer(502, b"<html>Bad Gateway</html>"), "answered 502"),
        (answer(200, b"{}", {"Content-Encoding": "gzip"}), "the connection to"),
    ],
)
async def test_invalid_responses(capsule: Tool, odd: FakeServer, script: Script, message: str) -> None:
    odd.reply = script
    assert message in await capsule.refused("account")


async def test_no_answer_in_time(capsule: Tool, odd: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STEP_SECONDS", 0.2)
    odd.reply = [HANG]
    assert "did not answer in time" in await capsule.refused("account")


async def test_an_error_shows_the_retry_time(capsule: Tool, odd: FakeServer) -> None:
    error = {"code": "DEPLOY_QUOTA_REACHED", "message": "Used up.\nCome back.", "requestId": "abc"}
    odd.reply = answer(429, {"error": error}, {"Retry-After": "90"})
    message = await capsule.refused("account")
    assert message == "Used up. Come back. (DEPLOY_QUOTA_REACHED, retry after 90 s, request abc)"


@pytest.mark.parametrize(
    "url",
    ["example.com", "ftp://example.com", "http://", "http://[::1", "http://u:p@host", "https://host/?a=b", "ü\x00"],
)
async def test_a_bad_address(tmp_path: Path, url: str) -> None:
    if "\x00" in url:  # no environment can hold it
        assert "is not an address" in await Tool("", "", tmp_path).refused("login", "--url", url, given="csk\n", code=2)
    else:
        assert "is not an address" in await Tool(url, "csk_key", tmp_path).refused("account", code=2)


async def test_an_invalid_key(odd: FakeServer, tmp_path: Path) -> None:
    for key in ("csk_ä", "csk_ 1", "csk_\x07"):
        assert "copy it again" in await Tool(odd.address, key, tmp_path).refused("account", code=2)
    assert not odd.exchanges


async def test_a_proxy_that_cannot_be_used(capsule: Tool) -> None:
    proxies = {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    assert "proxy" in await capsule.refused("account", code=2, **proxies)


async def interrupted(odd: FakeServer, *command: str) -> tuple[bytes, bytes]:
    """Runs a command, sends Ctrl-C while it waits for the service, and returns its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "capsule_gateway", *command),
        env={"PATH": os.environ["PATH"], "CAPSULE_URL": odd.address, "CAPSULE_API_KEY": "csk_key"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not odd.exchanges:
        await asyncio.sleep(0.02)
    process.send_signal(signal.SIGINT)
    written = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 130
    return written


async def test_ctrl_c(odd: FakeServer) -> None:
    odd.reply = [HANG]
    out, err = await interrupted(odd, "account")
    assert out + err.strip() == b""


async def test_ctrl_c_while_following_says_that_the_deploy_continues(odd: FakeServer) -> None:
    odd.reply = answer(200, {"id": "dep_1", "state": "queued", "log": ""})
    _, err = await interrupted(odd, "deploys", "show", "dep_1", "--follow")
    expected = "The deploy continues. Follow it again with: capsule deploys show dep_1 --follow"
    assert err.decode().strip() == expected


async def test_a_reader_that_leaves(odd: FakeServer, capsule: Tool) -> None:
    odd.reply = answer(200, [{"name": "n" * 100, "id": str(i)} for i in range(20_000)])
    line = f"{sys.executable} -m capsule_gateway hook list --json | head -c 10"
    process = await asyncio.create_subprocess_shell(
        line,
        env={"PATH": os.environ["PATH"], "CAPSULE_URL": odd.address, "CAPSULE_API_KEY": "csk_key"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (out, err) == (b'[{"name": ', b"")


async def test_requests_carry_the_key_and_quoted_names(odd: FakeServer, capsule: Tool) -> None:
    odd.reply = answer(201, {"id": "hook_1", "url": "https://x"})
    await capsule("hooks", "create", "shop", "--name", "ci")
    await capsule("hooks", "remove", "a/b?c")
    created, revoked = odd.exchanges
    assert created.path == "/account/apps/shop/hooks"
    assert revoked.path == "/account/hooks/a%2Fb%3Fc"
    assert created.header("authorization") == "Bearer csk_key"
    assert json.loads(created.body) == {"name": "ci"}
