"""Heartbeats, which show that a worker is alive. `check.py` reads them.

A heartbeat is a key in Redis that expires unless its worker renews it. The key contains the worker's name: its host
name, and the lowest number that no other worker of its group on that host uses. The workers that read a stream renew
their heartbeat in `stream.py`, because the heartbeat also reserves their name there. `monitors` and `sites` use
`keep_heartbeat`.
"""

import asyncio
import contextlib
import secrets
import socket

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable
from gateway.keys import HEARTBEAT_SECONDS, WORKER_STARTS_KEY, WORKER_STARTS_SECONDS, WORKERS_KEY, worker_key
from gateway.redis.client import Store

LISTED_SECONDS = 3_600  # that the list of these workers outlives the last renewal
RENEWAL_SECONDS = HEARTBEAT_SECONDS / 3  # between renewals
RETRY_SECONDS = 0.5  # until the next attempt after a failed one


def worker_name(number: int) -> str:
    return f"{socket.gethostname()}-{number}"


async def note_start(store: Store, group: str, name: str, token: str) -> None:
    """Remembers the start of a worker with this heartbeat for 15 minutes. Raises BackboneUnavailable."""
    now, _ = await store.client.time()
    async with store.client.pipeline(transaction=True) as pipe:
        pipe.zadd(WORKER_STARTS_KEY, {f"{group}:{name}:{token}": now})
        pipe.zremrangebyscore(WORKER_STARTS_KEY, 0, now - WORKER_STARTS_SECONDS)
        pipe.expire(WORKER_STARTS_KEY, WORKER_STARTS_SECONDS)
        await pipe.execute()


async def keep_heartbeat(store: Store, group: str, renewal_seconds: float = RENEWAL_SECONDS) -> None:
    """Renews the heartbeat of one worker until canceled."""
    token, number, is_noted = secrets.token_hex(8), 1, False
    while True:
        key, pause = worker_key(group, worker_name(number)), RETRY_SECONDS
        # If Redis is unavailable for too long, the heartbeat expires.
        with contextlib.suppress(BackboneUnavailable):
            owner = await store.client.set(key, token, nx=True, get=True, ex=HEARTBEAT_SECONDS)
            if owner not in (None, token):
                number += 1
                continue
            if owner == token:
                await store.client.expire(key, HEARTBEAT_SECONDS)
            await store.client.sadd(WORKERS_KEY, f"{group}:{worker_name(number)}")
            await store.client.expire(WORKERS_KEY, LISTED_SECONDS)
            if not is_noted:
                await note_start(store, group, worker_name(number), token)
                is_noted = True
            pause = renewal_seconds
        end_if_canceled()
        await asyncio.sleep(pause)
