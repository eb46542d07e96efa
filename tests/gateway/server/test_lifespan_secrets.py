"""A gateway or worker whose key cannot open the stored secrets says so, and serves."""

import json

import pytest

from tests.fakes import FakeAppBackend, FakeProvider
from tests.gateway.conftest import Launch
from tests.support.gateway_process import gateway
from tests.support.polling import wait_until
from tests.support.processes import ENCRYPTION_KEY
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

OTHER_KEY = "another-encryption-key-of-32-characters"
REASON = "GATEWAY_ENCRYPTION_KEY opens 0 of 1 stored secrets"


def lines(log: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.splitlines() if '"secrets.unopened"' in line]


async def test_a_key_that_opens_nothing(launch: Launch, backend: FakeAppBackend, provider: FakeProvider) -> None:
    async with launch() as right:
        app = await right.app(backend)
        await app.account.call("PUT", "/account/webhook", {"url": "http://127.0.0.1:9/"})
        url, folder = right.redis.url, right.folder
        async with gateway(url, provider, folder, GATEWAY_ENCRYPTION_KEY=OTHER_KEY) as wrong:

            async def warning() -> str:
                answer = await wrong.http.get("/ready")
                assert answer.status_code == 200
                return str(answer.json().get("warning", ""))

            await wait_until(warning, holds=lambda text: text == f"{REASON}.")
            await warning()
            (line,) = lines(wrong.log)
            assert (line["level"], line["reason"]) == ("error", REASON)
            assert "capsule secrets check" in line["action"]
            assert (await app.at(wrong).ask("x")).status_code == 200
        worker = await Worker(url, folder, "webhooks", GATEWAY_ENCRYPTION_KEY=OTHER_KEY).start()
        try:
            await wait_until(lambda: lines(worker.log))
        finally:
            await worker.stop()
        assert (await right.http.get("/ready")).json() == {"status": "ready"}
        assert not lines(right.log)
    assert ENCRYPTION_KEY != OTHER_KEY
