"""Heartbeats: how a worker shows that it is alive, and how `capsule worker --check` finds out.

A heartbeat is a key in Redis that expires unless its worker renews it. The key contains the worker's name: the name of
its host and the lowest number that no other worker of its group on that host has. The workers that read a stream renew
their heartbeat in `stream.py`, because the heartbeat also reserves their name there; `monitors` uses `keep_heartbeat`.
`sites` has none: it serves apps while Redis is away, so the check asks its web server instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from gateway.cancellation import end_if_cancelled
from gateway.errors import BackboneUnavailable
from gateway.settings import Settings
from gateway.store import keys
from gateway.store.client import Store, backbone

INTERVAL = keys.HEARTBEAT_SECONDS / 3  # seconds between two renewals
NUMBERS_CHECKED = 10  # a restarted worker takes the next number until its old heartbeat has expired
CHECK_SECONDS = 4.0  # less than the timeout of a container's health check


def worker_name(number: int) -> str:
    return f"{socket.gethostname()}-{number}"


async def keep_heartbeat(store: Store, group: str) -> None:
    """Renews the heartbeat of one worker for as long as its task runs."""
    token, number = secrets.token_hex(8), 1
    while True:
        end_if_cancelled()
        key = keys.worker_key(group, worker_name(number))
        # While Redis is away, the heartbeat expires unless it answers again in time.
        with contextlib.suppress(BackboneUnavailable), backbone():
            owner = await store.client.set(key, token, nx=True, get=True, ex=keys.HEARTBEAT_SECONDS)
            if owner not in (None, token):
                number += 1
                continue
            if owner == token:
                await store.client.expire(key, keys.HEARTBEAT_SECONDS)
        await asyncio.sleep(INTERVAL)


async def find_fault(settings: Settings, names: Sequence[str]) -> str:
    """Says which of these workers is not running on this host, and how that shows; empty if all are running."""
    store = Store(settings.redis_url)
    try:
        with backbone():
            async with asyncio.timeout(CHECK_SECONDS):
                for name in names:
                    if fault := await _find_worker_fault(settings, store, name):
                        return fault
    except BackboneUnavailable as error:
        cause = error.__cause__
        return f"Redis cannot be asked for heartbeats: {str(cause) or type(cause).__name__}"
    finally:
        await store.close()
    return ""


async def _find_worker_fault(settings: Settings, store: Store, name: str) -> str:
    if name == "sites":
        return await _find_sites_fault(Path(settings.data_dir))
    if name == "deploys" and settings.deploy_engine == "external":
        return ""  # an outside engine builds, and this worker waits without a heartbeat
    candidates = [keys.worker_key(name, worker_name(number)) for number in range(1, NUMBERS_CHECKED + 1)]
    if any(await store.get_all(candidates)):
        return ""
    return f"no {name} worker on {socket.gethostname()} has a heartbeat"


async def _find_sites_fault(folder: Path) -> str:
    from workers.sites import web  # here, because it imports most of the workers' code

    host, _, port = web.read_address(folder).rpartition(":")
    if not port:
        return f"no sites worker has served {folder} yet"
    try:
        async with asyncio.timeout(CHECK_SECONDS / 2):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return f"the web server for {folder} does not answer at {host}:{port}"
    writer.close()
    return ""
