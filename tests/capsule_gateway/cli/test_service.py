"""Services that are away, slow, unknown or wrong: one line on stderr, never a traceback. And `capsule login`."""

import asyncio
import json
import os
import pty
import signal
import ssl
import stat
import sys
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
webhooks set https://example.com
deliveries list
deliveries show evt_1
keys create ci
deploys list
deploys show dep_1 --follow --timeout 1
apps list
apps show shop
inference status
"""
STRANGE: list[Any] = [
    *(None, 7, [], {}, [1, 2], [{}]),
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


async def test_a_certificate_that_nobody_trusts(tls: tuple[ssl.SSLContext, str], tmp_path: Path) -> None:
    async with FakeServer(tls[0]) as server:
        server.reply = answer(200, [])
        capsule = Tool(server.address.replace("http:", "https:"), "csk_key", tmp_path)
        assert "certificate of https://127.0.0.1:" in await capsule.refused("keys", "list", SSL_CERT_FILE=None)
        assert (await capsule("keys", "list", SSL_CERT_FILE=tls[1])).code == 0


async def test_no_service_at_the_address(tmp_path: Path) -> None:
    capsule = Tool(f"http://127.0.0.1:{free_port()}", "csk_key", tmp_path)
    assert "cannot reach http://127.0.0.1:" in await capsule.refused("account")


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


async def test_requests_carry_the_key_and_quoted_names(stubbed: Tool, service: Service) -> None:
    await stubbed("hooks", "remove", "a/b?c")
    assert service.calls == ["DELETE /account/hooks/a%2Fb%3Fc"]
    assert service.exchanges[0].header("authorization") == "Bearer csk_key"


KEY, REFUSED = "csk_key", {"error": {"code": "UNAUTHORIZED", "message": "No.", "requestId": "r1"}}


def credentials(tool: Tool) -> Path:
    return tool.home / "capsule" / "credentials.json"


async def log_in(tool: Tool, service: Service) -> str:
    """Returns the line."""
    service.answers["GET /account"] = {"id": "acc_1", "name": "Vreni"}
    return (await tool("login", "--url", service.address + "/", given=f"{KEY}\n")).line


def keys(service: FakeServer) -> set[str | None]:
    """Returns the authorizations that the service got."""
    return {each.header("authorization") for each in service.exchanges}


async def test_login_and_logout(offline: Tool, service: Service) -> None:
    file = credentials(offline)
    line = f"Logged in to {service.address} as Vreni (acc_1). The key is saved in {file}."
    assert await log_in(offline, service) == line
    assert json.loads(file.read_text()) == {"url": service.address, "apiKey": KEY}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["credentials.json"]
    assert "acc_1" in (await offline("account")).out
    assert keys(service) == {f"Bearer {KEY}"}

    assert (await offline("logout")).line == "Logged out. The key remains valid."
    assert not file.exists()
    assert (await offline("logout")).line == "You were not logged in."


async def test_without_a_key(offline: Tool) -> None:
    assert await offline.refused("account", code=2) == "no API key: run 'capsule login', or set CAPSULE_API_KEY"


async def test_a_wrong_key_is_not_saved(offline: Tool, service: Service) -> None:
    service.replies = [answer(401, REFUSED)]
    address = service.address
    assert "this key is not valid at" in await offline.refused("login", "--url", address, given="csk_wrong\n")
    assert not credentials(offline).exists()
    assert "no key on standard input" in await offline.refused("login", "--url", address, given="", code=2)


async def test_a_broken_file(offline: Tool, service: Service) -> None:
    credentials(offline).parent.mkdir()
    credentials(offline).write_text("{")
    assert "run 'capsule login' again" in await offline.refused("account", code=2)
    await log_in(offline, service)
    assert "acc_1" in (await offline("account")).out


async def test_the_environment_takes_precedence_and_a_saved_key_goes_only_to_its_address(
    offline: Tool, service: Service
) -> None:
    async with FakeServer() as stranger:
        stranger.reply = answer(200, {"id": "acc_stranger"})
        await log_in(offline, service)
        message = await offline.refused("account", code=2, CAPSULE_URL=stranger.address)
        assert "set CAPSULE_API_KEY too" in message
        assert not stranger.exchanges
        assert "acc_1" in (await offline("account", CAPSULE_URL=service.address)).out
        other = {"CAPSULE_URL": stranger.address, "CAPSULE_API_KEY": "csk_other"}
        assert "acc_stranger" in (await offline("account", **other)).out
        await offline("account", CAPSULE_API_KEY="csk_third")
        assert (keys(service), keys(stranger)) == ({f"Bearer {KEY}", "Bearer csk_third"}, {"Bearer csk_other"})


async def test_login_prompts_in_a_terminal(offline: Tool, service: Service) -> None:
    service.answers["GET /account"] = {"id": "acc_1"}
    seen = await asyncio.to_thread(_log_in_at_terminal, offline, f"{service.address}\n", f"{KEY}\n")
    assert "Address of the service [http://localhost:8000]: " in seen
    assert "API key: " in seen
    assert KEY not in seen
    assert f"Logged in to {service.address}" in seen
    assert json.loads(credentials(offline).read_text())["apiKey"] == KEY


def _log_in_at_terminal(tool: Tool, *answers: str) -> str:
    """Runs `capsule login` in a terminal, and types an answer at each prompt. Returns the screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "XDG_CONFIG_HOME": str(tool.home)}
        os.execve(sys.executable, [sys.executable, "-m", "capsule_gateway", "login"], environment)
    seen, waiting = b"", list(answers)
    try:
        while part := os.read(terminal, 4096):
            seen += part
            if waiting and seen.endswith(b": "):
                os.write(terminal, waiting.pop(0).encode())
    except OSError:  # Linux raises it when the other side is closed
        pass
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return seen.decode()
