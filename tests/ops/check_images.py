"""The images and compose.yaml serve everything on a real engine, and lose nothing when containers die or are replaced.

`make check-images` runs it with the engine that `docker` reaches, in about three minutes. It builds both images, and
removes its containers and volumes at the end. COMPOSE_FILE can add files for this machine. Builds of apps use the
GATEWAY_BUILD_REGISTRIES and the GATEWAY_CA_FILE of the environment.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import httpx_sse
import pytest
import pytest_asyncio

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import COMPLETIONS
from tests.fakes.receiver import FakeReceiver, verified
from tests.support.polling import wait_until
from tests.support.redis_servers import free_port

ROOT = Path(__file__).parents[2]
INSTALL = (ROOT / "docs/install.md").read_text()
SERVICES = ("gateway", "workers", "deploys", "valkey")
HOST = "host.docker.internal"  # this machine, seen from the containers
PATIENCE_SECONDS = 120.0  # for a service that restarts
BUILD_SECONDS = 900.0

# The fakes run on this machine.
OVERRIDE = f"""
x-fakes: &fakes
  extra_hosts: ["{HOST}:host-gateway"]
services:
  gateway: *fakes
  workers: *fakes
"""


async def run(
    *command: str, environment: Mapping[str, str] | None = None, text: str = "", timeout: float = PATIENCE_SECONDS
) -> str:
    """Returns what the command prints, which reads `text`. Raises AssertionError with the end of it if it fails."""
    # Compose prefers settings of the environment to those of the file.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=inherited | (environment or {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(text.encode()), timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # if it takes too long
    assert process.returncode == 0, f"{command}: {out.decode()[-4000:]}{errors.decode()[-4000:]}"
    return out.decode()


def fill_in(example: str, values: dict[str, str]) -> str:
    """Returns the settings of .env.example with these values."""
    for name, value in values.items():
        example, found = re.subn(rf"^#?{name}=.*$", f"{name}={value}", example, flags=re.MULTILINE)
        assert found == 1, f"{name} is not in .env.example"
    return example


class Installation:
    """The services of compose.yaml, started as docs/install.md says, and the fakes around them."""

    def __init__(self, folder: Path, provider: FakeProvider, receiver: FakeReceiver, backend: FakeAppBackend) -> None:
        self.folder, self.provider, self.receiver, self.backend = folder, provider, receiver, backend
        self.port, self.gateway_port = free_port(), free_port()
        self.environment: dict[str, str] = {}
        self.key = self.secret = ""  # of the account and its webhook

    def prepare(self) -> None:
        """Writes `.env`, the folder of /etc/capsule and the override of compose.yaml."""
        (files := self.folder / "files").mkdir()
        (files / "provider-key").write_text(self.provider.key)
        settings = {
            "GATEWAY_BASE_URL": f"http://api.localhost:{self.port}",
            "GATEWAY_APPS_DOMAIN": "apps.localhost",
            "GATEWAY_OPERATOR_TOKEN": secrets.token_urlsafe(32),
            "GATEWAY_ENCRYPTION_KEY": secrets.token_urlsafe(32),
            "GATEWAY_PROVIDER_URL": f"http://{HOST}:{self.provider.port}/v1",
            "GATEWAY_PROVIDER_KEY_FILE": "/etc/capsule/provider-key",
            "VALKEY_PASSWORD": secrets.token_hex(32),
            "CAPSULE_LISTEN": str(self.port),
            "CAPSULE_PORT": str(self.gateway_port),
        }
        more = {"GATEWAY_ALLOW_PRIVATE_ADDRESSES": "true", "GATEWAY_APPS_URL": f"http://{{host}}:{self.port}"}
        if authorities := os.environ.get("GATEWAY_CA_FILE"):
            shutil.copy(authorities, files / "authorities.pem")
            more["GATEWAY_CA_FILE"] = "/etc/capsule/authorities.pem"
        if registries := os.environ.get("GATEWAY_BUILD_REGISTRIES"):
            more["GATEWAY_BUILD_REGISTRIES"] = registries
        text = fill_in((ROOT / ".env.example").read_text(), settings)
        (self.folder / "env").write_text(text + "".join(f"{name}={value}\n" for name, value in more.items()))
        (self.folder / "override.yaml").write_text(OVERRIDE)
        self.environment = {
            "COMPOSE_FILE": f"{os.environ.get('COMPOSE_FILE', 'compose.yaml')}:{self.folder / 'override.yaml'}",
            "COMPOSE_PROJECT_NAME": "capsule-check-images",
            "COMPOSE_ENV_FILES": str(self.folder / "env"),
            "CAPSULE_FILES": str(files),
        }

    async def compose(self, *arguments: str, timeout: float = PATIENCE_SECONDS) -> str:
        return await run("docker", "compose", *arguments, environment=self.environment, timeout=timeout)

    async def up(self) -> None:
        await self.compose("up", "--detach", "--wait", "--wait-timeout", "120", timeout=150)

    async def operate(self, *arguments: str, text: str = "") -> str:
        """Runs `capsule` as the operator, with the function of docs/install.md."""
        [function] = re.findall(r"^   (capsule\(\) \{\n.*?^   \}\n)", INSTALL, re.MULTILINE | re.DOTALL)
        script = f'{function}capsule "$@"'
        return await run("bash", "-c", script, "bash", *arguments, environment=self.environment, text=text)

    async def capsule(self, *arguments: str, timeout: float = PATIENCE_SECONDS) -> str:
        """Runs `capsule` on this machine with the account's key."""
        program = str(Path(sys.executable).with_name("capsule"))
        environment = {"CAPSULE_URL": f"http://127.0.0.1:{self.gateway_port}", "CAPSULE_API_KEY": self.key}
        return await run(program, *arguments, environment=environment, timeout=timeout)

    async def call(self, path: str, host: str = "api", address: str = "127.0.0.1") -> httpx.Response:
        headers = {"Host": f"{host}.localhost:{self.port}", "Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            return await http.get(f"http://{address}:{self.port}{path}", headers=headers)

    async def stream(self, address: str = "127.0.0.1") -> None:
        headers = {"Host": f"api.localhost:{self.port}", "Authorization": f"Bearer {self.backend.token()}"}
        url, body = f"http://{address}:{self.port}/capsule/asking/ai", {"prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=30) as http,
            httpx_sse.aconnect_sse(http, "POST", url, json=body, headers=headers) as source,
        ):
            events = [event async for event in source.aiter_sse()]
        assert "".join(json.loads(event.data).get("token", "") for event in events) == "".join(COMPLETIONS)
        assert events[-1].event == "done"

    async def serves_the_app(self) -> bool:
        try:
            page, route = await self.call("/", "notes.apps"), await self.call("/api/auth/jwks", "notes.apps")
        except httpx.TransportError:
            return False
        return page.status_code == route.status_code == 200 and "<script" in page.text and "keys" in route.json()

    async def answers(self) -> bool:
        try:
            return (await self.call("/account")).status_code == 200
        except httpx.TransportError:
            return False

    async def settled(self) -> int:
        async def spend() -> dict[str, Any] | None:
            found = (await self.call("/account")).json()["spend"]
            return None if found["reserved"] else found

        settled: int = (await wait_until(spend))["settled"]
        return settled

    async def restarts(self, service: str) -> tuple[int, str]:
        """Returns how often the engine has restarted the container, and its health."""
        [container] = (await self.compose("ps", "--all", "--quiet", service)).split()
        form = "{{.RestartCount}} {{.State.Health.Status}}"
        count, health = (await run("docker", "inspect", "--format", form, container)).split()
        return int(count), health

    async def kill(self, service: str) -> None:
        """Kills all processes of the container, as a lack of memory would, and waits until the engine has restarted it.

        The engine does not restart a container that `docker kill` ended.
        """
        count, _ = await self.restarts(service)
        # Detached, because the shell may be killed with the container.
        await self.compose("exec", "--detach", service, "sh", "-c", "kill -9 -1", timeout=30)
        await wait_until(
            lambda: self.restarts(service), PATIENCE_SECONDS, every=1, holds=lambda now: now == (count + 1, "healthy")
        )


@pytest_asyncio.fixture
async def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Installation]:
    for fake in (FakeProvider, FakeReceiver, FakeAppBackend):
        monkeypatch.setattr(fake, "host", "0.0.0.0")
    async with FakeProvider() as provider, FakeReceiver() as receiver, FakeAppBackend() as backend:
        service = Installation(tmp_path, provider, receiver, backend)
        service.prepare()
        try:
            await service.compose("build", timeout=BUILD_SECONDS)
            await service.up()
            yield service
        finally:
            print(await service.compose("logs", "--no-color"))  # pytest shows it if the test fails
            await service.compose("down", "--volumes", "--timeout", "5")


@pytest.mark.timeout(1800)
async def test_an_installation_serves_and_loses_nothing(installation: Installation) -> None:
    service = installation
    await open_account(service)
    for address in ("127.0.0.1", "[::1]"):
        await service.stream(address)
        for path in ("/metrics", "/ready", "/health"):
            assert (await service.call(path, address=address)).status_code == 404

    await service.capsule("new", "notes", str(service.folder / "notes"))
    await service.capsule("deploy", "--yes", str(service.folder / "notes"), timeout=BUILD_SECONDS)
    assert await service.serves_the_app()
    delivered = await wait_until(service.receiver.got, 30)
    assert [verified(exchange, service.secret)["type"] for exchange in delivered] == ["deploy.succeeded"]

    for name in SERVICES:
        await service.kill(name)
        await wait_until(service.answers, 30)
        await wait_until(service.serves_the_app, 60)
        await service.stream()

    spent = await service.settled()
    await service.compose("down")
    await service.up()
    await wait_until(service.serves_the_app, 60)
    assert await service.settled() == spent > 0
    await service.stream()
    assert set(service.receiver.ids().values()) == {1}, "an event was delivered twice"
    assert {exchange.json["type"] for exchange in service.receiver.got()} == {"deploy.succeeded"}


async def open_account(service: Installation) -> None:
    """Creates an account with a webhook and an app, and opens the gates."""
    created = json.loads(await service.operate("accounts", "create", "First account", "--plan", "starter", "--json"))
    service.key = created["apiKey"]
    auth = {"kind": "jwks", "url": service.backend.jwks_url.replace("127.0.0.1", HOST)}
    await service.operate("apps", "put", "asking", "-", text=json.dumps({"account": created["id"], "auth": auth}))
    await service.operate("inference", "approve")
    await service.operate("inference", "on")
    hook = service.receiver.url(host=HOST)
    service.secret = json.loads(await service.capsule("webhooks", "set", hook, "--json"))["secret"]
