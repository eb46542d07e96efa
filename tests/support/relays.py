"""The relay of an app, without a sandbox around it."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tests.support.background import in_background
from tests.support.polling import wait_until
from workers.sandbox.relay import LIMITS, RelayLimits, relay


@contextlib.asynccontextmanager
async def relaying(port: int, path: Path, limits: RelayLimits = LIMITS) -> AsyncIterator[Path]:
    """Connects the path to an app, for every user. Yields where a worker asks, and waits for the connections to end."""
    control = path.with_name(f"{path.name}-control")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        for each, where in zip(sockets, (path, control), strict=True):
            each.bind(str(where))
            stack.callback(where.unlink, missing_ok=True)
            each.listen(10)
        os.chmod(path, 0o666)
        before = asyncio.all_tasks()
        async with in_background(relay(port, sockets[0], sockets[1], limits=limits)) as task:
            yield control
            await wait_until(lambda: asyncio.all_tasks() <= before | {task})


@contextlib.asynccontextmanager
async def relayed(
    app: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    path: Path,
    limits: RelayLimits = LIMITS,
) -> AsyncIterator[Path]:
    """Connects the path to an app that is this function of the test, which gets each connection."""
    async with (
        await asyncio.start_server(app, "127.0.0.1", 0) as server,
        relaying(server.sockets[0].getsockname()[1], path, limits) as control,
    ):
        yield control
