"""`capsule login` and `logout`: the saved credentials, who can read them, and what takes precedence."""

import asyncio
import json
import os
import pty
import stat
import sys
from pathlib import Path

import pytest

from tests.capsule_gateway.cli.conftest import Service
from tests.fakes.server import FakeServer, answer
from tests.support.command_line import Tool

pytestmark = pytest.mark.asyncio(loop_scope="session")

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


async def test_without_a_key(offline: Tool) -> None:
    assert await offline.refused("account", code=2) == "no API key: run 'capsule login', or set CAPSULE_API_KEY"


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


async def test_a_wrong_key_is_not_saved(offline: Tool, service: Service) -> None:
    service.replies = [answer(401, REFUSED)]
    address = service.address
    assert "this key is not valid at" in await offline.refused("login", "--url", address, given="csk_wrong\n")
    assert not credentials(offline).exists()
    assert "no key on standard input" in await offline.refused("login", "--url", address, given="", code=2)


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


async def test_a_broken_file(offline: Tool, service: Service) -> None:
    credentials(offline).parent.mkdir()
    credentials(offline).write_text("{")
    assert "run 'capsule login' again" in await offline.refused("account", code=2)
    await log_in(offline, service)
    assert "acc_1" in (await offline("account")).out


async def test_a_folder_that_cannot_be_written(offline: Tool, service: Service) -> None:
    (offline.home / "capsule").write_text("a file where the folder should be")
    service.answers["GET /account"] = {"id": "acc_1"}
    assert str(offline.home / "capsule") in await offline.refused("login", "--url", service.address, given=f"{KEY}\n")


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
