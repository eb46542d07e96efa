"""A gateway or worker whose key cannot open the stored secrets says so, and serves."""

import json
from pathlib import Path

import pytest

from gateway.accounts.vault import Vault
from gateway.events.webhooks import Webhooks
from tests.fakes import FakeAppBackend, FakeProvider
from tests.support.gateway_process import gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.stores import opened
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

REASON = "GATEWAY_ENCRYPTION_KEY opens 0 of 1 stored secrets"


def lines(log: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.splitlines() if '"secrets.unopened"' in line]


async def test_a_key_that_opens_nothing(provider: FakeProvider, backend: FakeAppBackend, tmp_path: Path) -> None:
    with RedisServer() as server:
        async with opened(server.url) as store:
            vault = Vault("another-encryption-key-of-32-characters")
            await Webhooks(store, vault, allow_private=True).set_receiver("acc_1", "http://127.0.0.1:9/")
        async with gateway(server.url, provider, tmp_path) as wrong, Worker(server.url, tmp_path, "webhooks") as worker:

            async def warning() -> str:
                answer = await wrong.http.get("/ready")
                assert answer.status_code == 200
                return str(answer.json().get("warning", ""))

            await wait_until(warning, holds=lambda text: text == f"{REASON}.")
            await warning()
            (line,) = lines(wrong.log)
            assert (line["level"], line["reason"]) == ("error", REASON)
            assert "capsule secrets check" in line["action"]
            assert (await (await wrong.app(backend)).ask("x")).status_code == 200
            await wait_until(lambda: lines(worker.log))
