"""`capsule login` and `logout`: the saved credentials, who can read them, and what takes precedence."""

import asyncio
import json
import os
import pty
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.server import FakeServer, answer
from tests.support.accounts import Account
from tests.support.command_line import Tool
from tests.support.gateway_process import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def stranger() -> AsyncIterator[FakeServer]:
    """Another service."""
    async with FakeServer() as server:
        server.reply = answer(200, {"id": "acc_stranger"})
        yield server


def credentials(tool: Tool) -> Path:
    return tool.home / "capsule" / "credentials.json"


async def test_without_a_key(offline: Tool) -> None:
    assert await offline.refused("account", code=2) == "no API key: run 'capsule login', or set CAPSULE_API_KEY"


async def test_login_and_logout(offline: Tool, account: Account, gw: Gateway) -> None:
    line = (await offline("login", "--url", gw.address + "/", given=account.key + "\n")).line
    assert account.id in line
    assert str(credentials(offline)) in line
    assert json.loads(credentials(offline).read_text()) == {"url": gw.address, "apiKey": account.key}
    assert stat.S_IMODE(credentials(offline).stat().st_mode) == 0o600
    assert os.listdir(credentials(offline).parent) == ["credentials.json"]
    assert account.id in (await offline("account")).out

    assert (await offline("logout")).line == "Logged out. The key remains valid."
    assert not credentials(offline).exists()
    assert (await offline("logout")).line == "You were not logged in."


async def test_a_wrong_key_is_not_saved(offline: Tool, gw: Gateway) -> None:
    assert "this key is not valid at" in await offline.refused("login", "--url", gw.address, given="csk_wrong\n")
    assert not credentials(offline).exists()
    assert "no key on standard input" in await offline.refused("login", "--url", gw.address, given="", code=2)


async def test_the_environment_takes_precedence(
    offline: Tool, account: Account, gw: Gateway, stranger: FakeServer
) -> None:
    await offline("login", "--url", gw.address, given=account.key + "\n")
    other = await gw.account()
    assert other.id in (await offline("account", CAPSULE_API_KEY=other.key)).out
    assert "acc_stranger" in (await offline("account", CAPSULE_URL=stranger.address, CAPSULE_API_KEY="csk_other")).out


async def test_a_saved_key_is_sent_only_to_its_address(
    offline: Tool, account: Account, gw: Gateway, stranger: FakeServer
) -> None:
    await offline("login", "--url", gw.address, given=account.key + "\n")
    message = await offline.refused("account", code=2, CAPSULE_URL=stranger.address)
    assert "set CAPSULE_API_KEY too" in message
    assert not stranger.exchanges
    assert account.id in (await offline("account", CAPSULE_URL=gw.address)).out


async def test_a_broken_file(offline: Tool, account: Account, gw: Gateway) -> None:
    credentials(offline).parent.mkdir()
    credentials(offline).write_text("{")
    assert "run 'capsule login' again" in await offline.refused("account", code=2)
    await offline("login", "--url", gw.address, given=account.key + "\n")
    assert account.id in (await offline("account")).out


async def test_a_folder_that_cannot_be_written(offline: Tool, account: Account, gw: Gateway) -> None:
    (offline.home / "capsule").write_text("a file where the folder should be")
    assert "capsule" in await offline.refused("login", "--url", gw.address, given=account.key + "\n")


async def test_login_prompts_in_a_terminal(offline: Tool, account: Account, gw: Gateway) -> None:
    seen = await asyncio.to_thread(_log_in_at_terminal, offline, f"{gw.address}\n", f"{account.key}\n")
    assert "Address of the service [http://localhost:8000]: " in seen
    assert "API key: " in seen
    assert account.key not in seen
    assert f"Logged in to {gw.address}" in seen
    assert json.loads(credentials(offline).read_text())["apiKey"] == account.key


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
