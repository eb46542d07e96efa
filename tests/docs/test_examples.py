"""The receivers in docs/examples, run as a reader would run them, accept genuine events only."""

import contextlib
import http.client
import itertools
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
from gateway.events.webhooks import sign_event
from tests.support import programs
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port
from tests.support.worker_process import Account, Queue, queue

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TOOLS = {"receiver.py": sys.executable, "receiver.mjs": "node", "receiver.go": "go"}
MINUTES = 60.0
pytestmark = pytest.mark.asyncio(loop_scope="session")


def build_command(name: str, folder: Path) -> list[str]:
    """Returns the command that runs a receiver."""
    if shutil.which(TOOLS[name]) is None:
        programs.miss(TOOLS[name])
    if name != "receiver.go":
        return [TOOLS[name], str(EXAMPLES / name)]
    build = ["go", "build", "-o", str(folder / "receiver"), str(EXAMPLES / name)]
    subprocess.run(build, env={**os.environ, "GOCACHE": str(folder / "cache")}, check=True, timeout=100)
    return [str(folder / "receiver")]


class Example:
    """A receiver that runs, and an account whose events it gets."""

    def __init__(self, account: Account, port: int, out: Path) -> None:
        self.account, self.port, self._out = account, port, out
        self._numbers = itertools.count()

    @property
    def said(self) -> str:
        return self._out.read_text()

    async def takes(self, body: bytes, headers: dict[str, str]) -> int:
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            return (await client.post(f"http://127.0.0.1:{self.port}/hooks", content=body, headers=raw)).status_code

    def delivery(self, age: float = 0) -> tuple[str, bytes, dict[str, str]]:
        """Returns the id, the body and the headers of another event."""
        event, event_id = catalog.SAMPLES["app.unhealthy"], f"evt_{next(self._numbers)}"
        data = catalog.encode_data(event, "app_1", "café \u2028").decode()
        signed = sign_event([self.account.secret], event_id, event.type, data, time.time() - age)
        return event_id, signed.body, signed.headers


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def events_queue(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Queue]:
    async with queue(tmp_path_factory.mktemp("queue")) as running:
        await running.worker()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TOOLS)
async def example(
    request: pytest.FixtureRequest, events_queue: Queue, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Example]:
    folder, port = tmp_path_factory.mktemp("example"), free_port()
    command = build_command(request.param, folder)
    account = await events_queue.account(f"http://127.0.0.1:{port}/hooks")
    example = Example(account, port, folder / "said")
    environment = {"PATH": os.environ["PATH"], "SERVICE_WEBHOOK_SECRET": account.secret}
    with programs.running(*command, str(port), log=folder / "said", env=environment):
        await wait_until(lambda: f"listening on {port}" in example.said, 10)
        yield example
    assert "Error" not in example.said


async def test_what_a_worker_sends_is_accepted(example: Example) -> None:
    event_id = await example.account.emit()
    assert await example.account.outcome(event_id) == ("delivered", 204)
    await wait_until(lambda: f"{event_id} app.crashed" in example.said)


async def test_another_secret(example: Example) -> None:
    other = await example.account.queue.account(f"http://127.0.0.1:{example.port}/hooks")
    assert await other.outcome(await other.emit()) == ("failed", "status")


@pytest.mark.parametrize(
    ("age", "status"),
    [(0, 204), (4.9 * MINUTES, 204), (-4.9 * MINUTES, 204), (5.1 * MINUTES, 401), (-5.1 * MINUTES, 401), (1e8, 401)],
)
async def test_the_age_of_an_event(example: Example, age: float, status: int) -> None:
    event_id, *delivery = example.delivery(age)
    assert await example.takes(*delivery) == status
    if status == 204:
        await wait_until(lambda: f"{event_id} app.unhealthy" in example.said)


async def test_tampered_ones(example: Example) -> None:
    event_id, body, headers = example.delivery()
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
    assert event_id not in example.said


async def test_unsigned_ones(example: Example) -> None:
    event_id, body, headers = example.delivery()
    for missing in ("X-Service-Signature", "X-Service-Timestamp"):
        assert await example.takes(body, {k: v for k, v in headers.items() if k != missing}) == 401
    for timestamp in ("", "soon", "-1", "1e12", "9" * 400, "\xb2"):
        assert await example.takes(body, {**headers, "X-Service-Timestamp": timestamp}) == 401, timestamp
    assert event_id not in example.said


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
    assert await example.takes(*example.delivery()[1:]) == 204
