"""What workers need before they start."""

import asyncio
import multiprocessing
import os
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.keys import ENGINE_KEY, worker_key
from gateway.operations.layout import EXIT_CODE, CannotRun
from gateway.settings import load
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer, free_port
from tests.support.sandbox import require_control_groups
from tests.support.worker_process import Worker
from workers.__main__ import run_sites
from workers.child import keep_child, start_child, stop_with_parent

KEY = {"GATEWAY_ENCRYPTION_KEY": "k" * 32}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    return {
        "GATEWAY_APPS_ENGINE": "kubernetes",
        "GATEWAY_STORAGE_URL": f"file://{tmp_path}",
        "GATEWAY_DATA_DIR": str(tmp_path / "data"),
        "GATEWAY_REDIS_URL": "redis://127.0.0.1:1/0",
    }


@pytest.mark.parametrize(
    ("key", "config", "said"),
    [
        # The tokens of pods would be made from nothing, and everybody could make them.
        ({}, "", "GATEWAY_ENCRYPTION_KEY: is missing"),
        (KEY, None, "No cluster is known (Configuration file "),
        (KEY, "token: [secret", "No cluster is known (the file of KUBECONFIG is no kubeconfig); run this in a pod"),
    ],
)
async def test_what_is_missing_ends_the_start(
    settings: dict[str, str],
    key: dict[str, str],
    config: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    if config is not None:
        (tmp_path / "kubeconfig").write_text(config)
    with pytest.raises(CannotRun) as fault:
        await run_sites(load(settings | key))
    assert str(fault.value).startswith(said)


def test_what_is_missing_is_one_line(settings: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "capsule_gateway", "worker", "sites"]
    ended = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_CODE, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("GATEWAY_ENCRYPTION_KEY: is missing")


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


@pytest.mark.asyncio
async def test_the_end_of_the_parent_is_noticed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop watched the parent further, it would be busy until the process ends."""
    sentinel, parent = os.pipe()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(sentinel=sentinel))
    stopped = asyncio.Event()
    stop_with_parent(stopped)
    os.close(parent)
    await asyncio.wait_for(stopped.wait(), 5)
    assert not asyncio.get_running_loop().remove_reader(sentinel)
    os.close(sentinel)


@pytest.mark.parametrize(("code", "error"), [(EXIT_CODE, CannotRun), (3, RuntimeError)])
@pytest.mark.asyncio
async def test_a_child_that_cannot_run_ends_its_parent_with_the_same_code(code: int, error: type[Exception]) -> None:
    child = start_child(int, str(code))
    with pytest.raises(error):
        await asyncio.wait_for(keep_child(child), 10)
