"""Workers connect to a Redis server whose certificate was issued by a private authority."""

import ssl
from pathlib import Path

import pytest

from gateway.keys import ENGINE_KEY, worker_key
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.sandbox import require_control_groups
from tests.support.worker_process import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_every_worker_trusts_the_configured_authority(tls: tuple[ssl.SSLContext, str], tmp_path: Path) -> None:
    require_control_groups()
    port, (_, file) = free_port(), tls
    options = ("--tls-port", str(port), "--tls-cert-file", file, "--tls-key-file", file, "--tls-auth-clients", "no")
    with RedisServer("redis", *options) as server, passable_folder() as folder:
        settings = {
            "GATEWAY_CA_FILE": file,
            "GATEWAY_DATA_DIR": str(folder / "data"),
            "GATEWAY_STORAGE_URL": f"file://{folder / 'storage'}",
            "GATEWAY_APPS_LISTEN": f"127.0.0.1:{free_port()}",
        }
        names = ("webhooks", "monitors", "deploys", "sites")
        async with Worker(f"rediss://127.0.0.1:{port}", tmp_path, *names, **settings) as worker:
            worker.tracebacks_allowed = True  # uvloop logs one if a TLS handshake is given up on a busy machine
            with server.client() as client:
                await wait_until(lambda: client.exists(ENGINE_KEY), 30)
                for group in ("webhooks", "monitors", "deploys"):
                    await wait_until(lambda group=group: client.keys(worker_key(group, "*")), 30)
