"""What a queued deploy waits for, and how many builds are ahead of it.

The worker that builds knows the order. It writes it for the gateways, and it expires when no worker builds any more.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.deploys.keys import BUILD_POSITIONS_KEY
from gateway.redis.client import Store

LIFETIME = 15  # seconds

NO_WORKER = "a worker that builds deploys; none is running"
ENGINE = "the deploy engine"
BEING_TAKEN = "the worker, which takes it in a moment"


class Position(msgspec.Struct, frozen=True):
    position: int  # 1 is next
    waitsFor: str


async def write_positions(store: Store, positions: Mapping[str, Position]) -> None:
    """`positions` by deploy id. Raises BackboneUnavailable."""
    await store.client.set(BUILD_POSITIONS_KEY, msgspec.json.encode(positions), ex=LIFETIME)


async def read_positions(store: Store) -> dict[str, Position] | None:
    """None while no worker builds. Raises BackboneUnavailable."""
    record = await store.get(BUILD_POSITIONS_KEY)
    return None if record is None else msgspec.json.decode(record, type=dict[str, Position])
