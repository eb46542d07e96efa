"""`capsule dev`: runs the whole service on one machine. Each part starts after the parts it needs, and stops first."""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import httpx
import structlog

from capsule_gateway.dev import key_file, report, valkey
from capsule_gateway.dev.account import DemoApp, register_demo
from capsule_gateway.dev.children import DevProcess, StartFailed, run_child
from capsule_gateway.dev.demo import Demo, WriteTemplate, open_demo
from capsule_gateway.dev.identity import identity_router
from capsule_gateway.dev.in_process import hold_port, serve_app
from capsule_gateway.dev.layout import DRAIN_SECONDS, SHARED_DATA, Layout
from capsule_gateway.dev.model import model_app
from capsule_gateway.dev.own_app import remove_leftovers, run_own_app
from capsule_gateway.dev.registries import find_registries
from capsule_gateway.dev.visitor import open_app, wait_for_answer
from gateway.cancellation import run_in_background

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
        lock.write(f"at {layout.address} (process {os.getpid()})")
        lock.flush()
        yield


async def run_service(layout: Layout, write_template: WriteTemplate) -> None:
    """Runs until canceled. Raises StartFailed if a part cannot start or ends."""
    for folder in (layout.folder, layout.logs, layout.folder / "valkey"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(lock_folder(layout))
        children = await start_parts(layout, stack, write_template)
        waiting = [asyncio.create_task(child.wait_for_end()) for child in children]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        raise done.pop().result()


async def start_parts(layout: Layout, stack: AsyncExitStack, write_template: WriteTemplate) -> list[DevProcess]:
    """Starts everything on the stack. Returns the processes, none of which should end. Raises StartFailed."""
    model_listener = hold_ports(layout, stack)
    report.print_starting()
    make_data_folder(layout.data_dir)
    remove_leftovers(layout.data_dir)

    sandbox_fault = asyncio.create_task(asyncio.to_thread(find_sandbox_fault, layout))
    registries = asyncio.create_task(find_registries(layout.folder))
    run_keys = key_file.load(layout.keys)
    enter = stack.enter_async_context

    command = valkey.command(layout.valkey_port, layout.folder / "valkey")
    database = await enter(run_child("database", *command, log=layout.logs / "valkey.log", grace=10))
    await database.wait_until_ready(lambda: valkey.is_ready(layout.redis))
    await valkey.forget_folder(layout.redis)

    identity = identity_router(layout.issuer, f"{layout.gateway}/dashboard/callback", run_keys.oidc_secret)
    await enter(serve_app(model_app(run_keys.provider_key, identity), model_listener))

    stack.push_async_callback(stop_apps, layout.data_dir)  # after the workers, which the apps and Caddy outlive
    settings = layout.settings(run_keys) | await registries
    if layout.https:
        settings |= await start_caddy(layout, stack, settings)
    command = [*CAPSULE, "worker"]
    workers = await enter(run_child("workers", *command, log=layout.logs / "workers.log", grace=10, settings=settings))

    command = [*CAPSULE, "serve", "--port", str(layout.port)]
    gateway = await enter(
        run_child("gateway", *command, log=layout.logs / "gateway.log", grace=DRAIN_SECONDS + 5, settings=settings)
    )
    await gateway.wait_until_ready(lambda: is_ready(f"{layout.local}/ready"))

    app = await register_demo(layout, run_keys)
    key_file.save(run_keys, layout.keys)
    if layout.own_app:
        own = await start_own_app(layout, stack, run_keys, app, await sandbox_fault)
        return [database, workers, gateway, own]
    await start_demo(await enter(open_demo(layout, run_keys, app)), stack, write_template, await sandbox_fault)
    return [database, workers, gateway]


def hold_ports(layout: Layout, stack: AsyncExitStack) -> socket.socket:
    """Checks that all ports are free, before anything starts. Returns the listener of the model. Raises StartFailed."""
    hold_port(layout.port, "gateway").close()
    hold_port(layout.apps_port, "apps").close()
    hold_port(layout.valkey_port, "database").close()
    hold_port(layout.own_port, "app of a folder").close()
    return stack.enter_context(hold_port(layout.model_port, "model stand-in"))


async def start_caddy(layout: Layout, stack: AsyncExitStack, settings: Mapping[str, str]) -> dict[str, str]:
    """Starts Caddy before the other workers, which trust its authority. Returns the setting for that."""
    command, log = [*CAPSULE, "worker", "sites"], layout.logs / "sites.log"
    sites = await stack.enter_async_context(run_child("server of apps", *command, log=log, grace=10, settings=settings))

    async def has_authority() -> bool:
        return layout.root_certificate.exists()

    await sites.wait_until_ready(has_authority)
    return {"GATEWAY_CA_FILE": trust_authority(layout, settings)}


def trust_authority(layout: Layout, settings: Mapping[str, str]) -> str:
    """Returns a file with the certificate of Caddy's authority, beside those that are trusted already."""
    trusted = settings.get("GATEWAY_CA_FILE")
    others = Path(trusted).read_text() if trusted else ""
    bundle = layout.folder / "trusted.pem"
    bundle.write_text(f"{others}\n{layout.root_certificate.read_text()}")
    return str(bundle)


async def start_own_app(
    layout: Layout, stack: AsyncExitStack, run_keys: key_file.Keys, app: DemoApp, fault: tuple[str, str]
) -> DevProcess:
    """Starts the developer's own app, and prints the screen. Returns its process."""
    report.print_running(layout, run_keys.api_key, fault)
    child = await stack.enter_async_context(run_own_app(layout, run_keys, app))
    await stack.enter_async_context(run_in_background(announce_app(layout)))
    return child


async def start_demo(demo: Demo, stack: AsyncExitStack, write_template: WriteTemplate, fault: tuple[str, str]) -> None:
    """Prints the screen. Publishes the demo app in the background, if it is not live already."""
    can_build = not fault[0]
    is_built = can_build and await demo.is_current(write_template)
    await demo.write_token()
    report.print_running(demo.layout, demo.keys.api_key, fault, is_built=is_built)
    await stack.enter_async_context(run_in_background(demo.keep_token()))
    if can_build:
        await stack.enter_async_context(run_in_background(demo.publish_both(write_template, is_built=is_built)))


async def announce_app(layout: Layout) -> None:
    """Prints the address of the developer's own app when it answers."""
    began = time.monotonic()
    async with open_app(layout) as app:
        await wait_for_answer(app)
    report.print_answer(layout, time.monotonic() - began)


def make_data_folder(data_dir: Path) -> None:
    """Creates the folder. As root, the users of builds may traverse it but not list it."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0:
        for folder in {data_dir, SHARED_DATA} & {data_dir, *data_dir.parents}:
            folder.chmod(0o711)


async def stop_apps(data_dir: Path) -> None:
    """Stops the apps and Caddy, which outlive the workers. The next run starts them again."""
    from workers.hosting import caddy, watchdog

    try:
        await watchdog.stop_apps(data_dir)
    finally:
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


async def run_until_signal(layout: Layout, write_template: WriteTemplate) -> int:
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
        await run_service(layout, write_template)
    except asyncio.CancelledError:
        report.print_stopped()
        return 0
    except StartFailed as error:
        report.print_error(str(error))
    return 1
