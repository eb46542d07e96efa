"""The positions of queued deploys, and the reasons why they wait.

The worker that builds knows the order, and writes it for the gateways. The record expires when no worker builds.
"""

from collections.abc import Mapping

import msgspec

from gateway.keys import BUILD_POSITIONS_KEY
from gateway.redis.client import Store

LIFETIME_SECONDS = 15

NO_WORKER = "a worker that builds deploys; none is running"
EXTERNAL = "the deploy engine"
BEING_TAKEN = "the worker, which will take it in a moment"


class Position(msgspec.Struct, frozen=True):
    position: int  # 1 is next
    waitsFor: str


async def write_positions(store: Store, positions: Mapping[str, Position]) -> None:
    """Writes the positions by deploy id. Raises BackboneUnavailable."""
    await store.client.set(BUILD_POSITIONS_KEY, msgspec.json.encode(positions), ex=LIFETIME_SECONDS)


async def read_positions(store: Store) -> dict[str, Position] | None:
    """Returns the positions by deploy id; None while no worker builds. Raises BackboneUnavailable."""
    record = await store.get(BUILD_POSITIONS_KEY)
    return None if record is None else msgspec.json.decode(record, type=dict[str, Position])
