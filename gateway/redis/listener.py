"""Listens to channels of Redis for the life of a process.

Failure policy: a subscription that is silent for `HEARTBEAT_SECONDS` is pinged. It counts as lost when its connection
breaks, or when it leaves two pings without an answer, that is within a second of its last sign of life. The listener
then reports the loss at once, because messages may be missing from that moment, and subscribes again after a pause of
0.05 to 1 second. Messages that are published in between never arrive, so `on_subscribe` must catch up each time.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio.client import PubSub

from gateway.cancellation import end_if_canceled
from gateway.errors import BackboneUnavailable
from gateway.redis.client import Store
from gateway.redis.errors import code_of

logger = structlog.get_logger()

HEARTBEAT_SECONDS = 0.3  # without a message, after which the subscription is pinged
UNANSWERED_PINGS = 2  # after which it counts as lost
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0  # before the next attempt to subscribe


class Listener:
    """A listener to channels. It calls `on_message` with the channel and the text of each message.

    `on_subscribe` runs each time when all channels are subscribed. `on_loss` runs when the subscription has ended, for
    any reason, and after each failed attempt.
    """

    def __init__(
        self,
        store: Store,
        *channels: str,
        on_message: Callable[[str, str], None],
        on_subscribe: Callable[[], None] = lambda: None,
        on_loss: Callable[[], None] = lambda: None,
        loss_event: str,
    ) -> None:
        """`loss_event` is the name of the log line about a lost subscription."""
        self._store, self._channels = store, channels
        self._on_subscribe, self._on_message, self._on_loss = on_subscribe, on_message, on_loss
        self._loss_event = loss_event
        self._subscribed = False

    async def run(self) -> None:
        """Listens until the task is canceled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            end_if_canceled()
            try:
                async with self._store.subscription(*self._channels) as subscription:
                    await self._receive(subscription)
            except BackboneUnavailable as error:
                if self._subscribed:
                    logger.warning(self._loss_event, error=code_of(error.__cause__))
                    pause = FIRST_PAUSE_SECONDS
            finally:
                self._subscribed = False
                self._on_loss()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _receive(self, subscription: PubSub) -> None:
        """Raises TimeoutError, or redis-py's errors, when the subscription is lost."""
        unanswered = 0
        while unanswered <= UNANSWERED_PINGS:
            end_if_canceled()
            async with asyncio.timeout(self._store.command_seconds):
                message = await subscription.get_message(timeout=HEARTBEAT_SECONDS)
            if message is not None:
                unanswered = 0
                self._handle(message)
            elif (unanswered := unanswered + 1) <= UNANSWERED_PINGS:
                async with asyncio.timeout(self._store.command_seconds):
                    await subscription.ping()
        raise TimeoutError("the subscription does not answer")

    def _handle(self, message: dict[str, Any]) -> None:
        if message["type"] == "message":
            self._on_message(message["channel"], message["data"])
        elif message["type"] == "subscribe" and message["data"] == len(self._channels):
            self._subscribed = True
            self._on_subscribe()
