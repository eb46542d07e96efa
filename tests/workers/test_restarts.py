"""Workers that are killed in a container."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import passable_folder
from tests.support.hosted_apps import Hosting
from tests.support.polling import wait_until
from tests.support.preloaded import launch
from tests.support.processes import list_children
from tests.support.redis_servers import RedisServer, free_port
from workers.hosting import caddy

pytestmark = pytest.mark.asyncio


async def test_visitors_are_served_while_each_worker_is_killed() -> None:
    with RedisServer() as server, passable_folder() as folder:
        hosting = Hosting(folder)
        hosting.port = free_port()
        hosting.publish("dep_1", {"index.html": "page"})
        environment = {**os.environ, **hosting.worker(server.url).environment, "GATEWAY_KEEP_SERVING": "off"}
        command = ["worker", "--restart", "webhooks", "sites"]
        process = launch("capsule_gateway", command, {}, environment, folder, folder / "worker.log")
        answers: list[int] = []
        try:
            await wait_until(lambda: (folder / "web" / "address").exists(), 60)

            async def visit() -> None:
                while True:
                    answers.append((await hosting.ask("/")).status)
                    await asyncio.sleep(0.01)

            visiting = asyncio.create_task(visit())
            served_by = caddy.read_process(folder)
            for which in range(2):  # of two workers, which started in this order
                await wait_until(lambda: len(list_children(process.pid)) == 2, 20)
                workers = list_children(process.pid)
                os.kill(workers[which], signal.SIGKILL)
                await wait_until(lambda workers=workers: len(set(list_children(process.pid)) - set(workers)) == 1, 20)
                assert workers[1 - which] in list_children(process.pid), "the other one goes on"
                await asyncio.sleep(1)
            assert process.poll() is None
            visiting.cancel()
            assert len(answers) > 50
            assert set(answers) == {200}
            assert caddy.read_process(folder) == served_by, "it is the same Caddy"
            process.send_signal(signal.SIGHUP)
            assert await asyncio.to_thread(process.wait, 60) == 0
            assert caddy.read_process(folder) is None, "Caddy ends with the container"
        finally:
            process.kill()
            process.wait()
            await caddy.stop(folder)


async def test_the_log_goes_on_in_a_pipe(tmp_path: Path) -> None:
    """As a container's log. A forked process has none of the threads that write it."""
    hosting = Hosting(tmp_path)
    hosting.port = free_port()
    environment = {**os.environ, **hosting.worker("redis://127.0.0.1:1/0").environment}
    command = [sys.executable, "-m", "capsule_gateway", "worker", "--restart", "webhooks"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        for _ in range(2):
            while b"workers.started" not in (line := await asyncio.to_thread(process.stdout.readline)):
                assert line
            for worker in list_children(process.pid):
                os.kill(worker, signal.SIGKILL)
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
