"""nginx as a process. What it answers is tested with the embedded server, in test_web.py and test_forward.py."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting, needs_nginx
from tests.support.redis_servers import free_port
from workers.hosting import nginx

BIG = b"GET /big HTTP/1.1\r\nHost: shop.apps.test\r\n\r\n"


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    with passable_folder() as folder:
        needs_nginx(folder)
        hosting = Hosting(folder)
        hosting.publish("dep_1", {"index.html": "served"})
        (folder / "web").mkdir(mode=0o711)
        yield hosting


def processes(group: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(name)) == group and Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            pass
    return found


@contextlib.asynccontextmanager
async def left_behind(hosting: Hosting) -> AsyncIterator[asyncio.subprocess.Process]:
    """Its worker was killed: nobody but the next one stops it."""
    hosting.port = free_port()
    async with nginx.serve(hosting.folder, "127.0.0.1", hosting.port) as process:
        assert (await hosting.ask("/")).body == b"served"
        yield process
        await asyncio.wait_for(process.wait(), 5)


@pytest.mark.parametrize("killed", [False, True], ids=["whole", "master-killed"])
async def test_one_that_was_left_behind_is_ended(hosting: Hosting, killed: bool) -> None:
    async with left_behind(hosting) as process:
        assert len(processes(process.pid)) > 1
        if killed:
            process.kill()
            await process.wait()
            assert (await hosting.ask("/")).body == b"served", "workers serve on"
        before = asyncio.get_running_loop().time()
        await nginx.stop_former(hosting.folder)
        assert asyncio.get_running_loop().time() - before < 1
        assert processes(process.pid) == []
        with socket.create_server(("127.0.0.1", hosting.port)):
            pass  # the port is free


async def test_one_left_behind_that_still_sends_gets_a_moment(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nginx, "FORMER_DRAIN", 0.3)
    hosting.publish("dep_2", {"index.html": "served", "big": b"x" * 50_000_000})
    async with left_behind(hosting) as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port)
        writer.write(BIG)
        await reader.readline()
        await asyncio.wait_for(nginx.stop_former(hosting.folder), 5)
        assert processes(process.pid) == []
        writer.close()


async def test_anothers_nginx_is_left_alone(hosting: Hosting) -> None:
    async with left_behind(hosting) as process:
        with passable_folder() as folder:
            (folder / "web").mkdir()
            for stale in (str(process.pid), str(os.getpid()), "nonsense", ""):
                (folder / "web" / "nginx.pid").write_text(stale)
                await nginx.stop_former(folder)
        assert (await hosting.ask("/")).body == b"served"
        await nginx.stop_former(hosting.folder)


async def test_a_taken_port_is_an_error(hosting: Hosting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RuntimeError, match="did not start"):
        async with nginx.serve(hosting.folder, "127.0.0.1", taken.getsockname()[1]):
            pass
    assert nginx._find_former(hosting.folder) == []


async def test_what_is_under_way_ends_first(hosting: Hosting) -> None:
    hosting.publish("dep_2", {"big": b"x" * 20_000_000})
    hosting.port = free_port()
    async with nginx.serve(hosting.folder, "127.0.0.1", hosting.port):
        reader, writer = await asyncio.open_connection("127.0.0.1", hosting.port)
        writer.write(BIG)
        await reader.readuntil(b"\r\n\r\n")
        reading = asyncio.create_task(reader.readexactly(20_000_000))
    assert len(await reading) == 20_000_000
    writer.close()


def test_where_it_can_be_used(hosting: Hosting, tmp_path: Path) -> None:
    assert nginx.is_usable(hosting.folder)
    closed = tmp_path / "closed" / "data"
    closed.mkdir(parents=True)
    closed.parent.chmod(0o700)
    assert nginx.is_usable(closed) == (os.geteuid() != 0)


@pytest.mark.parametrize("name", ['a"b', "a$b", "a;b", "a{b", "a\nb", "a\\b"])
def test_no_folder_writes_the_configuration(name: str) -> None:
    with pytest.raises(ValueError, match="folder"):
        nginx.render_configuration(Path("/srv") / name, "127.0.0.1", 80)
