"""`make run`: everything on one machine, started in the order of need and stopped in reverse."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import click
import httpx
from dotenv import load_dotenv

from gateway.dev import kept, report, valkey
from gateway.dev.account import registered
from gateway.dev.children import Child, Refusal, child
from gateway.dev.demo import demo_app
from gateway.dev.layout import DRAIN, Layout
from gateway.dev.model import model_app
from gateway.dev.serving import claim, served


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """The lock goes with this process, however it ends."""
    with (layout.folder / "run.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refusal(f"It is running already, {lock.read()}. Ctrl-C there stops it.") from None
        lock.truncate(0)
        lock.write(f"at {layout.demo} (process {os.getpid()})")
        lock.flush()
        yield


async def run(layout: Layout) -> None:
    for folder in (layout.folder, layout.log("").parent, layout.folder / "valkey"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(alone(layout))
        children = await started(layout, stack)
        ended = [asyncio.create_task(child.ended()) for child in children]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        raise done.pop().result()


async def started(layout: Layout, stack: AsyncExitStack) -> list[Child]:
    # Every port is tried before anything starts.
    model_listener = stack.enter_context(claim(layout.model_port, "model stand-in"))
    demo_listener = stack.enter_context(claim(layout.demo_port, "demo app"))
    claim(layout.port, "gateway").close()
    claim(layout.valkey_port, "database").close()
    claim(layout.apps_port, "hosted apps").close()
    report.starting()

    keys = kept.load(layout.keys)
    settings = layout.settings(keys)
    enter = stack.enter_async_context

    command = valkey.command(layout.valkey_port, layout.folder / "valkey")
    database = await enter(child("database", *command, log=layout.log("valkey"), grace=10))
    await database.until(lambda: valkey.ready(layout.redis))

    await enter(served(model_app(keys.provider_key), model_listener))
    await enter(served(demo_app(keys.signing_key, layout.ai, layout.demo), demo_listener))

    command = [sys.executable, "-m", "workers"]
    workers = await enter(child("workers", *command, log=layout.log("workers"), grace=10, settings=settings))

    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(layout.port)]
    gateway = await enter(child("gateway", *command, log=layout.log("gateway"), grace=DRAIN + 5, settings=settings))
    await gateway.until(lambda: answers(f"{layout.gateway}/ready"))

    keys.api_key = await registered(layout.gateway, keys, layout.jwks)
    kept.save(keys, layout.keys)
    report.running(layout, keys.api_key)
    return [database, workers, gateway]


async def answers(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            return (await http.get(url)).is_success
        except httpx.TransportError:
            return False


async def supervised(layout: Layout) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def stop() -> None:
        if not task.cancelling():
            report.stopping()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await run(layout)
    except asyncio.CancelledError:
        report.stopped()
        return 0
    except Refusal as refusal:
        report.refused(str(refusal))
    return 1


@click.command()
@click.option("--port", envvar="CAPSULE_PORT", default=8000, type=click.IntRange(1024, 65531), show_default=True)
@click.option("--data-dir", envvar="GATEWAY_DATA_DIR", default=".capsule", type=click.Path(path_type=Path))
@click.option("--provider-url", envvar="GATEWAY_PROVIDER_URL")
def main(port: int, data_dir: Path, provider_url: str | None) -> None:
    """Run everything on this machine, on the given port and the four after it."""
    sys.exit(asyncio.run(supervised(Layout(port, data_dir.resolve(), provider_url))))


if __name__ == "__main__":
    load_dotenv(".env")  # the gateway reads it too, and the two must agree on the provider
    main()
