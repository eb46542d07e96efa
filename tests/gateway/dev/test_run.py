"""`capsule dev` on machines that can and cannot build apps."""

import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.dev.layout import Layout
from tests.support.dev_process import start
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.redis_servers import five_free_ports
from tests.support.user_namespace import FAULT

HELLO = {"Host": "hello.apps.localhost"}


def pack_page(text: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        file = tarfile.TarInfo("index.html")
        file.size = len(text)
        tar.addfile(file, io.BytesIO(text.encode()))
    return packed.getvalue()


@pytest.fixture
def folder() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


async def test_without_a_sandbox_the_screen_names_the_remedy_and_a_later_run_deploys(folder: Path) -> None:
    port = five_free_ports()
    run = await start(port, folder, confined=True)
    await run.read(until="Press Ctrl-C to stop.")
    try:
        assert f"  Hosted app  unavailable: {FAULT[0]}\n" in run.said
        assert f" To fix it: {FAULT[1]}, then start again.\n" in run.said
        assert "docker compose up" in run.said
        assert "make run ARGS=--trust-builds" in run.said
        assert f"hello.apps.localhost:{port + 1}" not in run.said
        deploy = await publish(port, run.api_key, pack_page("mine"))
        assert deploy["state"] == "failed"
        assert deploy["error"].startswith("build: this machine can't build apps safely: ")
        assert deploy["error"].endswith(": ".join(FAULT))
    finally:
        assert await run.stop() == 0
    # The next run deploys, in spite of the failed deploy and another folder for builds.
    (folder / "id").unlink()
    again = await start(port, folder)
    await again.read(until="Press Ctrl-C to stop.")
    try:
        assert f"Hosted app  http://hello.apps.localhost:{port + 1}" in again.said
        async with httpx.AsyncClient(base_url=again.hosted, headers=HELLO, trust_env=False) as http:
            assert "Hello from a capsule." in (await http.get("/")).text
    finally:
        assert await again.stop() == 0


async def publish(port: int, api_key: str, source: bytes) -> dict[str, Any]:
    """Publishes a source, and returns the deploy once it has ended."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=f"http://localhost:{port}", headers=headers, trust_env=False) as http:
        queued = await http.put("/account/apps/hello/source", content=source)
        deploy: dict[str, Any] = {}

        async def has_ended() -> bool:
            deploy.update((await http.get(f"/account/deploys/{queued.json()['deployId']}")).json())
            return deploy["state"] in ("live", "failed")

        await wait_until(has_ended, 30)
        return deploy


async def test_trust_builds_runs_apps_without_a_sandbox(folder: Path) -> None:
    port = five_free_ports()
    run = await start(port, folder, "--trust-builds")
    await run.read(until="Press Ctrl-C to stop.")
    try:
        assert "WITHOUT A SANDBOX" in run.said
        async with httpx.AsyncClient(base_url=run.hosted, headers=HELLO, trust_env=False) as http:
            assert "Hello from a capsule." in (await http.get("/")).text
    finally:
        assert await run.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user builds as itself")
async def test_root_builds_elsewhere_if_its_folder_is_closed_to_other_users(folder: Path) -> None:
    """Such as a folder below /root: builds run as other users."""
    port, closed = five_free_ports(), folder / "closed"
    closed.mkdir(mode=0o700)
    run = await start(port, closed / "data")
    await run.read(until="Press Ctrl-C to stop.")
    data_dir = Layout(port, closed / "data").data_dir
    try:
        assert str(data_dir) in run.said
        [release] = data_dir.glob("releases/hello/live/dep_*/files/index.html")
        assert "Hello from a capsule." in release.read_text()
        assert not (closed / "data" / "releases").exists()
        assert (closed / "data" / "keys.json").exists()
    finally:
        assert await run.stop() == 0
        shutil.rmtree(data_dir)
