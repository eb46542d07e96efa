"""Event webhooks: an account's receiver, the signed bodies sent to it, the queue of events, and the delivery log.

An event waits in its partition's stream until the worker knows its outcome. Its id is set when it is queued. Its
timestamp and signatures are made when it is sent, with the receiver of that moment.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence

import msgspec
import structlog

from gateway.accounts.records import Account, App
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.errors import BackboneUnavailable, NotFound, RateLimited, RequestMalformed, ServiceError
from gateway.events import catalog, scripts
from gateway.events.deliveries import (
    Delivery,
    DeliveryDetail,
    Filter,
    encode_body,
    find_failed,
    list_deliveries,
    read_delivery,
    sent_headers,
    stored_bytes,
)
from gateway.events.keys import previous_secret_key, redelivered_key, webhook_key
from gateway.events.records import QueuedEvent
from gateway.ids import new_id, now_iso
from gateway.outbound import addresses
from gateway.redis.client import Store
from gateway.redis.scripts import compare_and_set

logger = structlog.get_logger()

GROUP = "webhooks"
STREAM = "events"
CHECK_SECONDS = 2.0  # for the look-up of a receiver's name when it is saved
REQUESTS_PER_MINUTE = 30  # of one account, for test events and redeliveries together
DATA_BYTES = 262_144  # per event
OVERLAP = 86_400  # seconds after a rotation in which the previous secret signs too
REDELIVER_EVERY = 60  # seconds between requests of one account for all its failed events
BATCH = 50  # events queued again in one script
AGAIN = "An account can send all its failed events again once per minute; try again after the time in Retry-After."
HALFWAY = (
    "The service lost its store while it queued the events; some may be sent. In a minute, ask again for the rest."
)
CONTENDED = "The receiver is being changed from several places at once; try again."


class Receiver(msgspec.Struct, frozen=True):
    url: str
    secret: str  # encrypted
    createdAt: str


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


class SignedEvent(msgspec.Struct, frozen=True):
    body: bytes  # the exact bytes to send
    headers: dict[str, str]
    signatures: list[str]  # those in the headers


def sign_event(secrets: Sequence[str], event_id: str, event_type: str, data: str, now: float) -> SignedEvent:
    """`secrets`: the current one first. `now` is in seconds since the epoch."""
    timestamp = int(now * 1000)
    body = encode_body(event_id, event_type, data, timestamp)
    signature = hmac.new(secrets[0].encode(), b"%d." % timestamp + body, hashlib.sha256).hexdigest()
    signed = f"{event_id}.{timestamp // 1000}.".encode() + body  # Standard Webhooks has a timestamp in seconds
    standard = [_sign_standard(secret, signed) for secret in secrets]
    headers = sent_headers(event_id, event_type, timestamp, signature, standard)
    return SignedEvent(body, headers, [signature, *standard])


def _sign_standard(secret: str, signed: bytes) -> str:
    """Standard Webhooks uses the decoded secret as its key."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


class Webhooks:
    def __init__(self, store: Store, vault: Vault, *, allow_private: bool) -> None:
        self._store, self._vault, self._allow_private = store, vault, allow_private

    # -- the receiver ----------------------------------------------------------------------------------------

    async def receiver(self, account_id: str) -> Receiver | None:
        text = await self._store.get(webhook_key(account_id))
        return None if text is None else msgspec.json.decode(text, type=Receiver)

    async def set(self, account_id: str, url: str) -> tuple[Receiver, str | None]:
        """Returns the receiver, and its secret when the URL is new. The secret is never returned again."""
        url = await self._check_url(account_id, url)
        for _ in range(10):
            before = await self._store.get(webhook_key(account_id))
            if before is not None:
                receiver = msgspec.json.decode(before, type=Receiver)
                if receiver.url == url:
                    return receiver, None
            secret = new_secret()
            receiver = Receiver(url, self._seal(secret), now_iso())
            if await self._write(account_id, receiver, before or "", previous_secret=""):
                return receiver, secret
        raise BackboneUnavailable(CONTENDED)

    async def rotate(self, account_id: str) -> str:
        """Returns a new secret, which is never returned again. The one before signs too until `OVERLAP` is over.

        Raises NotFound without a receiver.
        """
        for _ in range(10):
            before = await self._store.get(webhook_key(account_id))
            if before is None:
                raise NotFound("No webhook is set; PUT {url} to /account/webhook to set one.")
            receiver = msgspec.json.decode(before, type=Receiver)
            secret = new_secret()
            rotated = msgspec.structs.replace(receiver, secret=self._seal(secret))
            if await self._write(account_id, rotated, before, previous_secret=receiver.secret):
                return secret
        raise BackboneUnavailable(CONTENDED)

    async def _write(self, account_id: str, receiver: Receiver, before: str, *, previous_secret: str) -> bool:
        """Returns False if the record is no longer the one `before`. The previous secret is encrypted, or ''."""
        record = msgspec.json.encode(receiver).decode()
        beside = (previous_secret_key(account_id), previous_secret, OVERLAP)
        return await compare_and_set(self._store, webhook_key(account_id), record, expected=before, beside=beside)

    async def previous_secret_ends(self, account_id: str) -> str | None:
        """When the secret before the last rotation stops signing; None if it has."""
        ends = await self._store.client.pexpiretime(previous_secret_key(account_id))
        return now_iso(ends / 1000) if ends > 0 else None

    def _seal(self, secret: str) -> str:
        try:
            return self._vault.seal(secret)
        except NoEncryptionKey as error:
            logger.error("webhook.not_sealed", error=str(error))
            raise ServiceError("No webhook can be set here until the operator gives the service its key.") from None

    async def clear(self, account_id: str) -> None:
        beside = (previous_secret_key(account_id), "", OVERLAP)
        await compare_and_set(self._store, webhook_key(account_id), "", beside=beside)

    async def _check_url(self, account_id: str, url: str) -> str:
        """Refuses private addresses with a clear message. Each delivery checks again, because names may change."""
        try:
            url = addresses.check_url(url, allow_private=self._allow_private)
            host, port = addresses.host_and_port(url)
            async with asyncio.timeout(CHECK_SECONDS):
                await addresses.resolve(host, port, tenant=account_id, allow_private=self._allow_private)
        except addresses.BlockedAddress as error:
            raise RequestMalformed(f"url: {error}") from None
        except (addresses.CallFailed, TimeoutError):
            pass  # the name may resolve later
        return url

    # -- events ----------------------------------------------------------------------------------------------

    async def emit(self, app: App, event: catalog.Event, event_id: str = "") -> str:
        """Queues an event of an app and returns its id. Raises BackboneUnavailable.

        With an `event_id` the call can be repeated: the event is queued once.
        """
        queued = catalog.queued_event(event, event_id or new_id("evt"), app.account, app.id, app.name)
        await scripts.emit(self._store, queued, once=bool(event_id))
        return queued.id

    async def test(self, account: Account, event_type: str, app: App | None) -> str:
        """Queues a sample and returns its id. Raises RateLimited."""
        sample = catalog.samples(account.plan, time.time()).get(event_type)
        if sample is None:
            raise RequestMalformed(f"type: choose one of {', '.join(catalog.SAMPLES)}.")
        app_id, name = (app.id, app.name) if app is not None else ("app_sample", "sample")
        queued = catalog.queued_event(sample, new_id("evt"), account.id, app_id, name)
        await self._request(account.id, queued.id, queued)
        return queued.id

    async def redeliver(self, account_id: str, event_id: str) -> None:
        """Queues the event again, with the same id. Raises RateLimited and NotFound."""
        await self._request(account_id, event_id, None)

    async def redeliver_failed(self, account_id: str, since: float) -> int:
        """Queues the events of the log again whose newest delivery failed, and which happened at `since` or later.

        Returns their number. `since` is in seconds since the epoch. Raises RateLimited.
        """
        key = redelivered_key(account_id)
        if not await self._store.client.set(key, "1", nx=True, ex=REDELIVER_EVERY):
            wait = await self._store.client.pttl(key)
            raise RateLimited(AGAIN, retry_after=wait / 1000)
        events = await find_failed(self._store, account_id, int(since * 1000))
        queued = 0
        try:
            for first in range(0, len(events), BATCH):
                queued += await scripts.redeliver(self._store, account_id, events[first : first + BATCH])
        except BackboneUnavailable as error:
            error.message, error.retry_after = HALFWAY, REDELIVER_EVERY
            raise
        return queued

    async def _request(self, account_id: str, event_id: str, sample: QueuedEvent | None) -> None:
        requested = await scripts.request_event(self._store, account_id, event_id, sample, limit=REQUESTS_PER_MINUTE)
        if requested.verdict == "rate":
            raise RateLimited(retry_after=requested.retry_in / 1_000_000)
        if requested.verdict == "unknown":
            raise NotFound("There is no delivery of this id whose content is still stored.")

    # -- the log ---------------------------------------------------------------------------------------------

    async def deliveries(
        self, account_id: str, limit: int, *, before: str = "", chosen: Filter | None = None
    ) -> list[Delivery]:
        """Newest first. Raises RequestMalformed for a `before` that is not in the log."""
        return await list_deliveries(self._store, account_id, limit, before, chosen or Filter())

    async def delivery(self, account_id: str, delivery_id: str) -> DeliveryDetail:
        """Raises NotFound."""
        return await read_delivery(self._store, account_id, delivery_id)

    async def stored_bytes(self, account_id: str) -> int:
        return await stored_bytes(self._store, account_id)
