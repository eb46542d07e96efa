"""The receivers in docs/examples, run as a reader would run them, accept genuine events only."""

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from gateway.events import catalog
from gateway.events.webhooks import new_secret, sign_event
from tests.support import programs
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.worker_process import queue

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TOOLS = {"receiver.py": sys.executable, "receiver.mjs": "node", "receiver.go": "go"}
NAMES = tuple(TOOLS)
MINUTES = 60.0
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns the command that runs each receiver, where its tool is installed."""
    found = {name: [tool, str(EXAMPLES / name)] for name, tool in TOOLS.items() if shutil.which(tool)}
    if "receiver.go" in found:
        program = tmp_path_factory.mktemp("go") / "receiver"
        cache = {"GOCACHE": str(program.parent / "cache")}
        build = ["go", "build", "-o", str(program), str(EXAMPLES / "receiver.go")]
        subprocess.run(build, env={**os.environ, **cache}, check=True, timeout=100)
        found["receiver.go"] = [str(program)]
    return found


def command(commands: dict[str, list[str]], name: str) -> list[str]:
    if name not in commands:
        programs.miss(TOOLS[name])
    return commands[name]


class Example:
    def __init__(self, port: int, secret: str, out: Path) -> None:
        self.port, self.secret, self._out = port, secret, out
        self.url = f"http://127.0.0.1:{port}/hooks"

    @property
    def said(self) -> str:
        return self._out.read_text()

    async def takes(self, body: bytes, headers: dict[str, str]) -> int:
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            return (await client.post(self.url, content=body, headers=raw)).status_code


@contextlib.asynccontextmanager
async def running(command: list[str], folder: Path, secret: str, port: int) -> AsyncIterator[Example]:
    example = Example(port, secret, folder / "said")
    environment = {"PATH": os.environ["PATH"], "SERVICE_WEBHOOK_SECRET": secret}
    with programs.running(*command, str(port), log=folder / "said", env=environment):
        await wait_until(lambda: f"listening on {port}" in example.said, 10)
        yield example
    assert "Error" not in example.said


@pytest_asyncio.fixture(loop_scope="session", params=NAMES)
async def example(
    request: pytest.FixtureRequest, commands: dict[str, list[str]], tmp_path: Path
) -> AsyncIterator[Example]:
    async with running(command(commands, request.param), tmp_path, new_secret(), free_port()) as example:
        yield example


def delivery(example: Example, age: float = 0) -> tuple[bytes, dict[str, str]]:
    event = catalog.SAMPLES["app.unhealthy"]
    data = catalog.encode_data(event, "app_1", "café \u2028").decode()
    signed = sign_event([example.secret], "evt_1", event.type, data, time.time() - age)
    return signed.body, signed.headers


@pytest.mark.parametrize("name", NAMES)
async def test_what_a_worker_sends_is_accepted(name: str, commands: dict[str, list[str]], tmp_path: Path) -> None:
    receiver, port = command(commands, name), free_port()
    async with queue(tmp_path) as events_queue:
        account = await events_queue.account(f"http://127.0.0.1:{port}/hooks")
        async with running(receiver, tmp_path, account.secret, port) as example:
            await events_queue.worker()
            event_id = await account.emit()
            assert await account.outcome(event_id) == ("delivered", 204)
            await wait_until(lambda: f"{event_id} app.crashed" in example.said)
            await account.set(f"http://127.0.0.1:{port}/other")
            assert await account.outcome(await account.emit()) == ("failed", "status"), "signed with another secret"


async def test_genuine_ones(example: Example) -> None:
    for age in (0, 4.9 * MINUTES, -4.9 * MINUTES):
        assert await example.takes(*delivery(example, age)) == 204
    await wait_until(lambda: example.said.count("evt_1 app.unhealthy") == 3)


async def test_stale_ones(example: Example) -> None:
    for age in (5.1 * MINUTES, -5.1 * MINUTES, 365 * 24 * 60 * MINUTES):
        assert await example.takes(*delivery(example, age)) == 401


async def test_tampered_ones(example: Example) -> None:
    body, headers = delivery(example)
    signature = headers["X-Service-Signature"]
    assert await example.takes(body.replace(b"timeout", b"Timeout"), headers) == 401
    assert await example.takes(body + b" ", headers) == 401
    assert await example.takes(b"", headers) == 401
    later = str(int(headers["X-Service-Timestamp"]) + 1)
    assert await example.takes(body, {**headers, "X-Service-Timestamp": later}) == 401
    for forged in (
        "",
        signature[:-1],
        signature + "0",
        signature.upper(),
        signature.removeprefix("sha256="),
        "sha256=" + "0" * 64,
        "sha256=" + "\xe9" * 64,
    ):
        assert await example.takes(body, {**headers, "X-Service-Signature": forged}) == 401, forged
    assert "evt_1" not in example.said


async def test_unsigned_ones(example: Example) -> None:
    body, headers = delivery(example)
    for missing in ("X-Service-Signature", "X-Service-Timestamp"):
        assert await example.takes(body, {k: v for k, v in headers.items() if k != missing}) == 401
    for timestamp in ("", "soon", "-1", "1e12", "9" * 400, "\xb2"):
        assert await example.takes(body, {**headers, "X-Service-Timestamp": timestamp}) == 401, timestamp
    assert "evt_1" not in example.said


async def test_what_is_too_long_is_not_kept(example: Example) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", example.port, timeout=5)
    try:
        connection.putrequest("POST", "/hooks")
        connection.putheader("Content-Length", str(2**30))
        connection.endheaders()
        for _ in range(20):
            connection.send(bytes(65536))
    except (BrokenPipeError, ConnectionResetError):
        pass
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        assert connection.getresponse().status == 413
    connection.close()
    assert await example.takes(*delivery(example)) == 204
