"""Asks the relay of a pod (`web.py`), which an app can't take over: it listens before the app starts."""

import asyncio
import contextlib
from typing import NamedTuple

import msgspec

from workers.engine.health import Listening
from workers.kubernetes.pod import RELAY_PORT

ANSWER_SECONDS = 5.0
LINE_BYTES = 4_096


class RelayState(NamedTuple):
    idle_seconds: float  # without a visitor
    listening: Listening | None  # None: an earlier version of the service made the pod


async def ask_relay(ip: str) -> RelayState:
    """Raises OSError, or ValueError for an odd answer."""
    async with asyncio.timeout(ANSWER_SECONDS):
        reader, writer = await asyncio.open_connection(ip, RELAY_PORT, limit=LINE_BYTES)
        with contextlib.closing(writer):
            idle, listening = float(await reader.readline()), await reader.readline()
    try:
        return RelayState(idle, msgspec.json.decode(listening, type=Listening) if listening else None)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
