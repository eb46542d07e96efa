"""The receivers in docs/examples, the tutorial and the page about backups, run as a reader would run them."""

import contextlib
import http.client
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import yaml

from gateway.events import catalog
from gateway.events.webhooks import sign_event
from tests.docs.pages import run, run_shell, sections
from tests.support import programs
from tests.support.dev_process import Run, start
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, five_free_ports, free_port
from tests.support.s3_server import BUCKET, S3Server
from tests.support.worker_process import Account, Queue, queue

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TOOLS = {"receiver.py": sys.executable, "receiver.mjs": "node", "receiver.go": "go"}
MINUTES = 60.0


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
        async with httpx.AsyncClient(trust_env=False, timeout=30, verify=False) as client:
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


async def test_the_age_of_an_event(example: Example) -> None:
    ages = (0, 4.9 * MINUTES, -4.9 * MINUTES, 5.1 * MINUTES, -5.1 * MINUTES, 1e8)
    sent = {age: example.delivery(age) for age in ages}
    taken = {age: await example.takes(body, headers) for age, (_, body, headers) in sent.items()}
    assert list(taken.values()) == [204, 204, 204, 401, 401, 401]
    await wait_until(lambda: all(f"{sent[age][0]} app.unhealthy" in example.said for age in ages[:3]))


async def test_what_is_not_as_it_was_signed(example: Example) -> None:
    event_id, body, headers = example.delivery()
    signature, timestamp = headers["X-Service-Signature"], headers["X-Service-Timestamp"]
    for tampered in (body.replace(b"timeout", b"Timeout"), body + b" ", b""):
        assert await example.takes(tampered, headers) == 401, tampered
    forged = ["", signature[:-1], signature + "0", signature.upper(), signature.removeprefix("sha256=")]
    forged += ["sha256=" + "0" * 64, "sha256=" + "\xe9" * 64]
    times = [str(int(timestamp) + 1), "", "soon", "-1", "1e12", "9" * 400, "\xb2"]
    others = [("X-Service-Signature", value) for value in forged] + [("X-Service-Timestamp", value) for value in times]
    for name, value in others:
        assert await example.takes(body, {**headers, name: value}) == 401, (name, value)
    for missing in ("X-Service-Signature", "X-Service-Timestamp"):
        assert await example.takes(body, {name: kept for name, kept in headers.items() if name != missing}) == 401
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


@pytest_asyncio.fixture(loop_scope="session")
async def service() -> AsyncIterator[Run]:
    with passable_folder() as folder:
        service = await start(five_free_ports(), folder)
        await service.read(until="Press Ctrl-C to stop.")
        yield service
        assert await service.stop() == 0


@pytest.mark.timeout(400)
async def test_the_tutorial(service: Run, tmp_path: Path) -> None:
    page = sections("first-capsule.md", {"https://api.example.com": f"http://localhost:{service.port}"})
    # The clone has the command line. tests/gateway/api/test_install.py installs it.
    assert page["Get the command line"].take("sh") == f"curl -fsSL http://localhost:{service.port}/install.sh | sh\n"
    own = page["A service on your machine"]
    assert own.take("sh") == "make run\n"
    blocks = [own.take("sh")]
    for title in ("Write the app", "Publish it", "Change it", "Look inside", "Pages only"):
        while page[title].has("sh"):
            blocks.append(page[title].take("sh"))
    script = [f"cd {shlex.quote(str(ROOT))}", *blocks]
    done = await run("bash", "-euc", "\n".join(script), folder=tmp_path, given=f"{service.api_key}\n", seconds=300)
    assert done.code == 0, done.out + done.err
    assert re.findall(r"^Live at (\S+) after", done.out, re.MULTILINE) == [
        f"http://notes.apps.localhost:{service.port + 1}" for _ in range(3)
    ] + [f"http://leaflet.apps.localhost:{service.port + 1}"]
    assert "BETTER_AUTH_SECRET" in done.out
    async with httpx.AsyncClient(base_url=service.hosted, trust_env=False, timeout=30) as http:
        for app, title in (("notes", "notes"), ("leaflet", "leaflet")):  # after the rollback
            shown = await http.get("/", headers={"Host": f"{app}.apps.localhost:{service.port + 1}"})
            assert f"<title>{title}</title>" in shown.text


# `docker compose run … SERVICE COMMAND` runs the command here. Others are noted. Each must name services that exist.
DOCKER = """\
#!/bin/bash -eu
echo "$*" >> "$HOME/docker.log"
[ "$1" = compose ] && shift
while [[ $1 == --* ]]; do shift 2; done
verb=$1; shift
while [ $# -gt 0 ]; do
  case $1 in
    -v) shift 2 ;;
    -*) shift ;;
    *) [[ " $SERVICES " == *" $1 "* ]] || { echo "no service $1" >&2; exit 1; }
       if [ "$verb" = run ]; then shift; exec "$@"; fi
       shift ;;
  esac
done
"""
ACCOUNT = '{"id":"acc_1","name":"A","plan":"free","createdAt":"2026-07-02T10:00:00.000Z"}'


async def test_the_page_about_backups(valkey: RedisServer, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    target = str(tmp_path / "target")
    page = sections(
        "backup.md",
        {
            "/mnt/backups/capsule": target,
            "/var/backups/capsule": target,
            "s3://bucket/capsule": f"s3://{BUCKET}/backups",
            " TARGET\n": f" {target}\n",
        },
    )
    async with S3Server(tmp_path) as s3:
        s3.environment.pop("GATEWAY_STORAGE_URL")
        settings = {
            **s3.environment,
            "GATEWAY_REDIS_URL": redis_url,
            "GATEWAY_DATA_DIR": str(tmp_path / "data"),
            "GATEWAY_ENCRYPTION_KEY": "an-encryption-key-of-32-characters",
            "SERVICES": " ".join(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]),
        }

        async def follow(title: str) -> list[str]:
            """Returns the lines that the next block prints."""
            block = f'PATH="$HOME/bin:$PATH"\n{page[title].take("")}'
            done = await run_shell(block, tmp_path, **settings)
            assert done.code == 0, done.out + done.err
            return done.out.splitlines()

        with valkey.client() as client:
            client.set("{p09}:account:acc_1", ACCOUNT)
            printed = await follow("Back up")
            written = page["Back up"].take("").strip()
            form = re.sub(
                r"\d[\d:.\-TZ]*", lambda _: r"\d\S*", re.escape(written).replace("\\-", "-").replace("\\.", ".")
            )
            assert len(printed) == 2
            assert all(re.fullmatch(form, line) for line in printed), (form, printed)
            assert "complete" in (await follow("Every day"))[-1]
            assert (await follow("Verify"))[-1].startswith("The backup of ")
            for _ in range(2):  # the second way is Compose's
                client.flushall()
                assert (await follow("Restore"))[-1].startswith("Restored 1 accounts and 0 apps as of ")
                assert client.get("{p09}:account:acc_1") == ACCOUNT.encode()
            client.flushall()
    assert not any(page[title].left for title in ("Back up", "Every day", "Verify", "Restore"))
    assert (tmp_path / "docker.log").read_text().splitlines()[-3:] == [
        "compose --profile backup stop gateway workers deploys backup",
        f"compose run --rm -v ./backups:{target} deploys capsule restore {target}",
        "compose up -d",
    ]
