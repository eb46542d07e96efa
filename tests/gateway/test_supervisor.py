"""The figures of processes that are no more: they leave /metrics, and their files leave the disk."""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

from gateway.supervisor import PREFIX, metrics_folder, remove_gauges_of_others
from tests.fakes import FakeAppBackend, FakeProvider
from tests.fakes.provider import ROLE, chunk
from tests.fakes.server import HANG
from tests.support.gateway_process import Gateway
from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer


async def figure(gw: Gateway, name: str) -> float | None:
    response = await gw.http.get("/metrics", headers={"Connection": "close"})
    found = re.search(rf"^{name} (\S+)$", response.text, re.M)
    return float(found[1]) if found else None


def workers(gw: Gateway) -> list[int]:
    """The processes that serve; the supervisor's other child tracks resources."""
    assert gw.process
    pid = gw.process.pid
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
async def test_gauges_of_dead_processes(
    provider: FakeProvider, backend: FakeAppBackend, valkey: RedisServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Ten open streams stayed ten after both processes had been killed."""
    gw = Gateway(valkey.url, provider, tmp_path, GATEWAY_DRAIN="1")
    gw.workers = 2
    try:
        await gw.start()
        app = await gw.app(backend)
        prompt = provider.plays(ROLE, chunk("a"), HANG)
        headers = app.headers(Connection="close")
        body = {"prompt": prompt, "stream": True}
        asking = [asyncio.create_task(app.post(body, headers=headers)) for _ in range(10)]

        async def streams(expected: float) -> bool:
            return await figure(gw, "gateway_streams_open") == expected

        await wait_until(lambda: streams(10), 15)
        before = await figure(gw, r'gateway_requests_total\{code="",door="native",status="200"\}')
        for pid in workers(gw):
            os.kill(pid, number)
        await asyncio.gather(*asking, return_exceptions=True)
        await wait_until(lambda: gw.answers("/health"), 20)
        await wait_until(lambda: streams(0), 20)
        # Counters must not decrease.
        assert await figure(gw, r'gateway_requests_total\{code="",door="native",status="200"\}') == before
    finally:
        await gw.stop()
        await gw.http.aclose()


def test_only_live_gauges_of_others_are_removed(tmp_path: Path) -> None:
    names = ["gauge_livesum_1.db", "gauge_livesum_2.db", "gauge_livemostrecent_1.db", "counter_1.db", "histogram_1.db"]
    for name in names:
        (tmp_path / name).touch()
    remove_gauges_of_others(tmp_path, {2, None})
    assert {path.name for path in tmp_path.iterdir()} == {"gauge_livesum_2.db", "counter_1.db", "histogram_1.db"}


@pytest.mark.asyncio(loop_scope="session")
async def test_the_next_start_removes_what_a_killed_one_left(
    provider: FakeProvider, valkey: RedisServer, tmp_path: Path
) -> None:
    """A folder of figures stayed in /tmp for each SIGKILL."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    gw = Gateway(valkey.url, provider, tmp_path, TMPDIR=str(temporary))
    gw.workers = 2
    try:
        await gw.start()
        (left,) = temporary.glob(f"{PREFIX}*")
        orphans = workers(gw)
        gw.kill()
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        assert left.exists()
        await gw.start()
        (found,) = temporary.glob(f"{PREFIX}*")
        assert found != left
        assert await figure(gw, "gateway_streams_open") == 0
        await gw.stop()
        assert not [*temporary.glob(f"{PREFIX}*")]
    finally:
        await gw.stop()
        await gw.http.aclose()


def test_folders_in_use_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    with metrics_folder() as first, metrics_folder() as second:
        assert first.exists()
        assert second.exists()
        assert first != second
    assert (tmp_path / "elsewhere" / "lock").exists()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_single_process_has_its_own_figures_only(
    provider: FakeProvider, valkey: RedisServer, tmp_path: Path
) -> None:
    """With PROMETHEUS_MULTIPROC_DIR set, the figures of earlier runs were added to its own."""
    folder = tmp_path / "figures"
    folder.mkdir()
    gw = Gateway(valkey.url, provider, tmp_path, PROMETHEUS_MULTIPROC_DIR=str(folder))
    try:
        await gw.start()
        assert await figure(gw, "gateway_streams_open") == 0
        assert not [*folder.iterdir()]
    finally:
        await gw.stop()
        await gw.http.aclose()
