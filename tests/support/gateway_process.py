"""Runs the gateway as users do, as a process, and calls it over HTTP.

When a gateway ends, its log is checked: it contains no prompt, answer, token or key.
"""

import asyncio
import contextlib
import json
import re
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import COMPLETIONS
from tests.support.accounts import DOMAIN, Account, App
from tests.support.folders import passable_folder
from tests.support.key_leaks import assert_no_leak
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY, ServiceProcess
from tests.support.redis_monitor import Wiretap
from tests.support.redis_servers import RedisServer, free_port

OPERATOR = "operator-" + secrets.token_hex(16)
GENERATED = re.compile(rb"prompt [0-9a-f]{16}")  # as `FakeProvider.plays` makes most prompts


class Gateway(ServiceProcess):
    redis: RedisServer
    wiretap: Wiretap

    def __init__(
        self,
        redis_url: str,
        provider: FakeProvider,
        folder: Path,
        constants: Mapping[str, float] = {},
        prefix: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self.provider = provider
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.off_file = folder / "inference.off"
        self.workers = 1
        environment = {
            "GATEWAY_REDIS_URL": redis_url,
            "GATEWAY_BASE_URL": self.address,
            "GATEWAY_APPS_DOMAIN": DOMAIN,
            "GATEWAY_INFERENCE": "on",
            "GATEWAY_PROCESSING_APPROVED": "true",
            "GATEWAY_PROVIDER_URL": provider.url,
            "GATEWAY_PROVIDER_KEY": provider.key,
            "GATEWAY_OPERATOR_TOKEN": OPERATOR,
            "GATEWAY_EMERGENCY_OFF_FILE": str(self.off_file),
            "GATEWAY_DATA_DIR": str(folder / "data"),
            **settings,
        }
        confidential = {OPERATOR, ENCRYPTION_KEY, provider.key}
        super().__init__(folder / f"gateway-{self.port}.log", confidential, constants, prefix, environment)
        self.http = httpx.AsyncClient(
            base_url=self.address,
            timeout=30,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=50),
            trust_env=False,
            verify=False,  # over plain HTTP, so that it need not read the authorities
        )

    @property
    def data_folder(self) -> Path:
        return Path(self.environment["GATEWAY_DATA_DIR"])

    async def start(self) -> Self:
        self.launch("capsule_gateway", "serve", "--port", str(self.port), "--workers", str(self.workers))
        deadline = time.monotonic() + 60
        while not await self.answers("/health"):
            if self.code is not None or time.monotonic() > deadline:
                await self.stop()
                raise RuntimeError(f"the gateway did not start:\n{self.log}")
            await asyncio.sleep(0.05)
        return self

    async def answers(self, path: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.http.get(path)).status_code == 200
        return False

    async def stop(self, timeout: float = 15) -> int | None:
        """Also returns None for a gateway that had to be killed, because its streams may have no end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await super().stop(timeout)
        return None

    def empty(self) -> None:
        """Empties Redis and the data folder for the next test. No key may be left without expiry or reason."""
        # Builds leave folders too deep for `shutil.rmtree`. A killed app's last write may come between rm's steps.
        ends = time.monotonic() + 10
        while left := [*self.data_folder.iterdir()]:
            done = subprocess.run(["rm", "-rf", *left], capture_output=True, text=True, check=False)
            assert not done.returncode or time.monotonic() < ends, done.stderr
        with self.redis.client() as client:
            try:
                assert_no_leak(client)
            finally:
                client.flushall()

    @property
    def secrets(self) -> set[str]:
        # Short prompts such as "x" occur everywhere.
        prompts = [p for p in self.provider.prompts if len(p) >= 8]
        return {*self.confidential, *prompts, *COMPLETIONS}

    def find_secrets(self, text: bytes) -> list[str]:
        """Returns the secrets that the text contains. One search finds all generated prompts, which are thousands."""
        prompts = set(GENERATED.findall(text))
        encoded = {secret: secret.encode() for secret in self.secrets}
        return [name for name, each in encoded.items() if each in (prompts if GENERATED.fullmatch(each) else text)]

    def assert_log_is_clean(self) -> None:
        super().assert_log_is_clean()
        assert "GET /" not in self.log, "paths may contain secrets"

    async def request_line(self, request_id: str) -> dict[str, Any]:
        """Returns the log line of a request."""

        def found() -> list[dict[str, Any]]:
            lines = (json.loads(line) for line in self.log.splitlines() if request_id in line)
            return [line for line in lines if line["event"] == "request"]

        (line,) = await wait_until(found)
        return dict(line)

    async def platform(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        return await self.http.request(method, f"/platform/{path}", json=body, headers=headers)

    async def switch(self, **gates: bool) -> httpx.Response:
        return await self.platform("PUT", "inference", gates)

    async def account(self, plan: str = "max") -> Account:
        name = f"Account {secrets.token_hex(3)}"
        response = await self.platform("POST", "accounts", {"name": name, "plan": plan})
        assert response.status_code == 201, response.text
        body = response.json()
        self.confidential.add(body["apiKey"])
        return Account(self, body["id"], body["apiKey"])

    async def app(self, backend: FakeAppBackend, plan: str = "max", **fields: Any) -> App:
        return await (await self.account(plan)).app(backend, **fields)


@contextlib.asynccontextmanager
async def gateway(
    redis_url: str,
    provider: FakeProvider,
    folder: Path,
    constants: Mapping[str, float] = {},
    *,
    workers: int = 1,
    prefix: Sequence[str] = (),
    **settings: str,
) -> AsyncIterator[Gateway]:
    """Runs a gateway with these settings, by their full names. Empty settings are left out."""
    with passable_folder() as data:
        settings = {"GATEWAY_DATA_DIR": str(data), **settings}
        running = Gateway(redis_url, provider, folder, constants, prefix, **settings)
        running.workers = workers
        try:
            await running.start()
            yield running
        finally:
            await running.stop()
            await running.http.aclose()
    running.assert_log_is_clean()


@contextlib.asynccontextmanager
async def gateway_with_redis(
    provider: FakeProvider, folder: Path, constants: Mapping[str, float] = {}, **options: Any
) -> AsyncIterator[Gateway]:
    """Runs a gateway with its own Redis (`.redis`), which is searched afterwards for content and leaked keys."""
    with RedisServer() as server:
        async with Wiretap(server) as tap, gateway(server.url, provider, folder, constants, **options) as running:
            running.redis, running.wiretap = server, tap
            yield running
        written = running.find_secrets(tap.heard)
        assert not written, f"Redis received {written}"
        if server.running:
            with server.client() as client:
                assert_no_leak(client)
