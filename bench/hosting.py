"""Measures the server of hosted apps: the cost and the delay of a file, its memory with many apps, and a swap.

Caddy runs alone on core 1. This script and its visitors share core 0. `--command` measures another server instead,
which serves the folder `$folder` at 127.0.0.1:`$port`. The exit code is 1 if an answer was wrong, but never because of
a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import string
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).parent.parent))

from rig import cpu_seconds, free_port, list_processes, open_folder, resident_mib, two_cores

from gateway.settings import Settings
from workers.hosting import caddy
from workers.hosting.releases import Releases, Site

APPS = 1_000
VISITORS = 8
SECONDS = 10.0
PER_CONNECTION = 500  # requests; nginx closes a connection after 1,000
SWAPS = 50
PAGE = "<!doctype html><p>" + "x" * 4_000  # a file of 4 KB


def make_site(releases: Releases, name: str, deploy_id: str, page: str) -> Site:
    site = releases.site("acc_1", name)
    files = site.release(deploy_id) / "files"
    files.mkdir(parents=True, exist_ok=True)
    (files / "index.html").write_text(page)
    site.swap(deploy_id)
    releases.serve_as(f"{name}.apps.test", site)
    return site


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> bytes:
    writer.write(f"GET / HTTP/1.1\r\nHost: {name}.apps.test\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


async def measure_files(port: int, pid: int) -> None:
    delays: list[float] = []
    ends, began = time.monotonic() + SECONDS, cpu_seconds(pid)

    async def visitor() -> None:
        while time.monotonic() < ends:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(PER_CONNECTION):
                asked = time.monotonic()
                assert await ask(reader, writer, "app-0") == PAGE.encode()
                delays.append((time.monotonic() - asked) * 1_000)
            writer.close()

    await asyncio.gather(*(visitor() for _ in range(VISITORS)))
    cuts, used = quantiles(delays, n=100), cpu_seconds(pid) - began
    print(f"files: {len(delays) / used:,.0f} requests per CPU second, p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms")


async def measure_memory(port: int, pid: int) -> None:
    for first in range(0, APPS, PER_CONNECTION):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(first, first + PER_CONNECTION):
            assert await ask(reader, writer, f"app-{number}") == PAGE.encode()
        writer.close()
    print(f"memory after a request to each of {APPS:,} apps: {resident_mib(pid):.0f} MiB")


async def measure_swaps(releases: Releases, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    delays = []
    for number in range(SWAPS):
        page = f"release {number}"
        site = make_site(releases, "swapped", f"dep_{number:03}a", "former")
        assert await ask(reader, writer, "swapped") == b"former"
        files = site.release(f"dep_{number:03}b") / "files"
        files.mkdir(parents=True)
        (files / "index.html").write_text(page)
        swapped = time.monotonic()
        site.swap(f"dep_{number:03}b")
        while await ask(reader, writer, "swapped") != page.encode():
            pass
        delays.append((time.monotonic() - swapped) * 1_000)
    writer.close()
    cuts = quantiles(delays, n=100)
    print(f"from a swap to the first new byte: p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms")


async def run(command: str | None, folder: Path, core: int) -> None:
    releases = Releases(folder)
    releases.create_folders()
    for number in range(APPS):
        make_site(releases, f"app-{number}", "dep_1", PAGE)
    if command is None:
        server = caddy.Caddy(Settings(apps_listen="127.0.0.1:0", data_dir=str(folder)), releases.folder)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
        port = listener.getsockname()[1]
        await server.start(listener)
        process = caddy.read_process(releases.folder)
        assert process is not None
        pid, stop = process.pid, server.stop
    else:
        port = free_port()
        words = string.Template(command).substitute(folder=folder, port=port).split()
        started = subprocess.Popen(words, cwd=folder)
        pid = started.pid
        await asyncio.sleep(3)

        async def stop() -> None:
            started.terminate()
            await asyncio.to_thread(started.wait, 20)

    try:
        for each in list_processes(pid):
            for thread in os.listdir(f"/proc/{each}/task"):
                os.sched_setaffinity(int(thread), {core})
        await measure_files(port, pid)
        await measure_memory(port, pid)
        await measure_swaps(releases, port)
    finally:
        await stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", help="another server, with $folder and $port in it")
    options = parser.parse_args()
    others, alone = two_cores()
    os.sched_setaffinity(0, {others})
    asyncio.run(run(options.command, open_folder("hosting"), alone))
    return 0


if __name__ == "__main__":
    sys.exit(main())
