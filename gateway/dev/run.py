"""`capsule dev`: runs the whole service on one machine. Each part starts after the parts it needs, and stops first."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import structlog

from gateway.dev import keys, report, valkey
from gateway.dev.account import deploy_demo, register_demo
from gateway.dev.children import Child, StartFailed, run_child
from gateway.dev.demo import demo_app
from gateway.dev.front import serve_front
from gateway.dev.layout import DRAIN_SECONDS, SHARED_DATA, Layout
from gateway.dev.model import model_app
from gateway.dev.serving import claim_port, serve_app

CAPSULE = [sys.executable, "-m", "capsule_gateway"]


@contextmanager
def lock_folder(layout: Layout) -> Iterator[None]:
    """Allows one run per folder. The lock ends with this process, even if the process is killed."""
    with (layout.folder / "run.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StartFailed(f"Already running {lock.read()}. Press Ctrl-C there to stop it.") from None
        lock.truncate(0)
        lock.write(f"at {layout.demo} (process {os.getpid()})")
        lock.flush()
        yield


async def run_service(layout: Layout) -> None:
    """Runs until canceled. Raises StartFailed if a part cannot start or ends."""
    for folder in (layout.folder, layout.logs, layout.folder / "valkey"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(layout))
        children = await start_parts(layout, stack)
        waiting = [asyncio.create_task(child.wait_for_end()) for child in children]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        raise done.pop().result()


async def start_parts(layout: Layout, stack: AsyncExitStack) -> list[Child]:
    """Starts everything on the stack. Returns the processes, none of which should end. Raises StartFailed."""
    # All ports are claimed before anything starts.
    model_listener = stack.enter_context(claim_port(layout.model_port, "model stand-in"))
    apps_listener = stack.enter_context(claim_port(layout.demo_port, "demo app"))
    demo_listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    claim_port(layout.port, "gateway").close()
    claim_port(layout.valkey_port, "database").close()
    claim_port(layout.apps_port, "hosted apps").close()
    report.print_starting()
    make_data_folder(layout.data_dir)

    sandbox_fault = asyncio.create_task(asyncio.to_thread(find_sandbox_fault, layout))
    run_keys = keys.load(layout.keys)
    settings = layout.settings(run_keys)
    enter = stack.enter_async_context

    command = valkey.command(layout.valkey_port, layout.folder / "valkey")
    database = await enter(run_child("database", *command, log=layout.logs / "valkey.log", grace=10))
    await database.wait_until_ready(lambda: valkey.is_ready(layout.redis))
    await valkey.forget_builder(layout.redis)

    await enter(serve_app(model_app(run_keys.provider_key), model_listener))
    demo = demo_app(run_keys.signing_key, layout.ai, layout.demo, layout.hosted)
    await enter(serve_app(demo, demo_listener))
    await enter(serve_front(apps_listener, demo_listener.getsockname()[1], layout.apps_port))

    stack.push_async_callback(stop_caddy, layout.data_dir)  # after the workers, which it outlives
    command = [*CAPSULE, "worker"]
    workers = await enter(run_child("workers", *command, log=layout.logs / "workers.log", grace=10, settings=settings))

    command = [*CAPSULE, "serve", "--port", str(layout.port)]
    gateway = await enter(
        run_child("gateway", *command, log=layout.logs / "gateway.log", grace=DRAIN_SECONDS + 5, settings=settings)
    )
    await gateway.wait_until_ready(lambda: is_ready(f"{layout.gateway}/ready"))

    run_keys.api_key = await register_demo(layout.gateway, run_keys, layout.jwks)
    keys.save(run_keys, layout.keys)
    fault, remedy = await sandbox_fault
    fault = fault or await deploy_demo(layout.gateway, run_keys.api_key, layout.hosted, layout.ai)
    report.print_running(layout, run_keys.api_key, fault, remedy)
    return [database, workers, gateway]


def make_data_folder(data_dir: Path) -> None:
    """Creates the folder. As root, the users of builds may traverse it but not list it."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0:
        for folder in {data_dir, SHARED_DATA} & {data_dir, *data_dir.parents}:
            folder.chmod(0o711)


async def stop_caddy(data_dir: Path) -> None:
    from workers.hosting import caddy

    await caddy.stop(data_dir)


def find_sandbox_fault(layout: Layout) -> tuple[str, str]:
    """Returns why builds and apps can't run on this machine, and the remedy; both are empty if they can."""
    from workers.sandbox import machine, sandbox

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # no log on the screen
    try:
        sandbox.Sandbox(development=True, users=sandbox.BUILD_USERS, trusted=layout.trust_builds).check(layout.data_dir)
    except machine.Unsafe as error:
        return error.reason, error.remedy
    return "", ""


async def is_ready(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            return (await http.get(url)).is_success
        except httpx.TransportError:
            return False


async def run_until_signal(layout: Layout) -> int:
    """Runs the service until a signal, and returns the exit code."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def stop() -> None:
        if not task.cancelling():
            report.print_stopping()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await run_service(layout)
    except asyncio.CancelledError:
        report.print_stopped()
        return 0
    except StartFailed as error:
        report.print_error(str(error))
    return 1
