"""Event webhooks: an account's receiver, the signed bodies sent to it, and the queue of events.

An event waits in its partition's stream until a worker knows its outcome. It gets its id when it is queued, and its
timestamp and signatures when it is sent, to the receiver that is set at that moment.
"""

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
from gateway.errors import BackboneUnavailable, NotFound, RateLimited, RequestMalformed
from gateway.events import catalog, scripts
from gateway.events.deliveries import build_headers, encode_body, find_failed
from gateway.events.records import QueuedEvent
from gateway.ids import new_id, now_iso
from gateway.keys import previous_secret_key, redelivered_key, webhook_key
from gateway.loops import batched
from gateway.outbound import addresses
from gateway.redis.client import Store
from gateway.redis.compare_and_set import Change, change_record
from gateway.redis.scripts import Companion, compare_and_set
from gateway.validation import parse_time

logger = structlog.get_logger()

GROUP = "webhooks"
STREAM = "events"
RESOLVE_SECONDS = 2.0  # for the DNS look-up of a new receiver
REQUESTS_PER_MINUTE = 30  # of one account, for test events and redeliveries together
DATA_BYTES = 262_144  # per event
OVERLAP_SECONDS = 86_400  # after a rotation, in which the previous secret still signs
REDELIVER_SECONDS = 60  # between requests of one account for all its failed events
EVENTS_PER_SCRIPT = 50  # queued again in one step
REDELIVERY_LIMITED = (
    "An account can send all its failed events again once per minute; try again after the time in Retry-After."
)
REDELIVERY_INTERRUPTED = (
    "The service lost its connection to Redis while it queued the events. Some may be sent; try again in a minute to "
    "queue the rest."
)


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
    """Returns the event as it is sent. `secrets` begins with the current one. `now` is in seconds since the epoch."""
    timestamp = int(now * 1000)
    body = encode_body(event_id, event_type, data, timestamp)
    signature = hmac.new(secrets[0].encode(), b"%d." % timestamp + body, hashlib.sha256).hexdigest()
    signed = f"{event_id}.{timestamp // 1000}.".encode() + body  # Standard Webhooks counts seconds
    standard = [_sign_standard(secret, signed) for secret in secrets]
    headers = build_headers(event_id, event_type, timestamp, signature, standard)
    return SignedEvent(body, headers, [signature, *standard])


def _sign_standard(secret: str, signed: bytes) -> str:
    """Returns a signature of Standard Webhooks, whose key is the decoded secret."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


class Webhooks:
    def __init__(self, store: Store, vault: Vault, *, allow_private: bool) -> None:
        self._store, self._vault, self._allow_private = store, vault, allow_private

    # -- the receiver ----------------------------------------------------------------------------------------

    async def find_receiver(self, account_id: str) -> Receiver | None:
        text = await self._store.get(webhook_key(account_id))
        return None if text is None else msgspec.json.decode(text, type=Receiver)

    async def set_receiver(self, account_id: str, url: str) -> tuple[Receiver, str | None]:
        """Returns the receiver, and its secret when the URL is new. The secret is never returned again."""
        url = await self._check_url(account_id, url)

        async def compute(present: str) -> Change[tuple[Receiver, str | None]]:
            if present:
                receiver = msgspec.json.decode(present, type=Receiver)
                if receiver.url == url:
                    return Change(None, (receiver, None))
            secret = new_secret()
            receiver = Receiver(url, self._seal(secret), now_iso())
            companion = Companion(previous_secret_key(account_id), "", OVERLAP_SECONDS)
            return Change(msgspec.json.encode(receiver).decode(), (receiver, secret), companion)

        return await change_record(self._store, webhook_key(account_id), compute, subject="the receiver")

    async def rotate_secret(self, account_id: str) -> str:
        """Returns a new secret, which is never returned again. The previous one signs too for `OVERLAP_SECONDS`.

        It does not if its encryption key is lost. Raises NotFound if no receiver is set.
        """

        async def compute(present: str) -> Change[str]:
            if not present:
                raise NotFound("No webhook is set; PUT {url} to /account/webhook to set one.")
            receiver = msgspec.json.decode(present, type=Receiver)
            secret = new_secret()
            rotated = msgspec.structs.replace(receiver, secret=self._seal(secret))
            previous = receiver.secret if self._vault.find_key(receiver.secret) else ""
            companion = Companion(previous_secret_key(account_id), previous, OVERLAP_SECONDS)
            return Change(msgspec.json.encode(rotated).decode(), secret, companion)

        return await change_record(self._store, webhook_key(account_id), compute, subject="the receiver")

    async def read_previous_secret_end(self, account_id: str) -> str | None:
        """Returns the time at which the secret before the last rotation stops signing; None if it has stopped."""
        ends = await self._store.client.pexpiretime(previous_secret_key(account_id))
        return now_iso(ends / 1000) if ends > 0 else None

    def _seal(self, secret: str) -> str:
        try:
            return self._vault.seal(secret)
        except NoEncryptionKey as error:
            raise RequestMalformed(f"The operator of this service must {error}.") from None

    async def clear_receiver(self, account_id: str) -> None:
        companion = Companion(previous_secret_key(account_id), "", OVERLAP_SECONDS)
        await compare_and_set(self._store, webhook_key(account_id), "", companion=companion)

    async def _check_url(self, account_id: str, url: str) -> str:
        """Raises RequestMalformed for a private address. Each delivery checks again, because names may change."""
        try:
            url = addresses.check_url(url, allow_private=self._allow_private)
            host, port = addresses.host_and_port(url)
            async with asyncio.timeout(RESOLVE_SECONDS):
                await addresses.resolve(host, port, tenant=account_id, allow_private=self._allow_private)
        except addresses.BlockedAddress as error:
            raise RequestMalformed(f"url: {error}") from None
        except (addresses.CallFailed, TimeoutError):
            pass  # the name may resolve later
        return url

    # -- events ----------------------------------------------------------------------------------------------

    async def emit(self, app: App, event: catalog.Event, event_id: str = "") -> str:
        """Queues an event of an app and returns its id. Raises BackboneUnavailable.

        With an `event_id`, repeated calls queue the event once.
        """
        queued = catalog.prepare_event(event, event_id or new_id("evt"), app.account, app.id, app.name)
        await scripts.emit_event(self._store, queued, once=bool(event_id))
        return queued.id

    async def queue_sample(self, account: Account, event_type: str, app: App | None, apps_domain: str) -> str:
        """Queues a sample event of the app and returns its id. Raises RequestMalformed and RateLimited."""
        app_id, name = (app.id, app.name) if app is not None else ("app_sample", "sample")
        sample = catalog.build_samples(account.plan, time.time(), f"{name}.{apps_domain}").get(event_type)
        if sample is None:
            raise RequestMalformed(f"type: choose one of {', '.join(catalog.SAMPLES)}.")
        queued = catalog.prepare_event(sample, new_id("evt"), account.id, app_id, name)
        await self._request(account.id, queued.id, queued)
        return queued.id

    async def redeliver(self, account_id: str, event_id: str) -> None:
        """Queues the event again, with the same id. Raises RateLimited and NotFound."""
        await self._request(account_id, event_id, None)

    async def redeliver_failed(self, account_id: str, since: str) -> int:
        """Queues again the logged events from `since` on whose newest delivery failed; returns their number.

        `since` is a time as `gateway/ids.py` reads it. Raises RequestMalformed and RateLimited.
        """
        first_at = parse_time("since", since)
        key = redelivered_key(account_id)
        if not await self._store.client.set(key, "1", nx=True, ex=REDELIVER_SECONDS):
            wait = await self._store.client.pttl(key)
            raise RateLimited(REDELIVERY_LIMITED, retry_after=wait / 1000)
        events = await find_failed(self._store, account_id, int(first_at * 1000))
        queued = 0
        try:
            for batch in batched(events, EVENTS_PER_SCRIPT):
                queued += await scripts.redeliver_events(self._store, account_id, batch)
        except BackboneUnavailable as error:
            error.message, error.retry_after = REDELIVERY_INTERRUPTED, REDELIVER_SECONDS
            raise
        return queued

    async def _request(self, account_id: str, event_id: str, sample: QueuedEvent | None) -> None:
        requested = await scripts.request_event(self._store, account_id, event_id, sample, limit=REQUESTS_PER_MINUTE)
        if requested.verdict == "rate":
            raise RateLimited(retry_after=requested.retry_in / 1_000_000)
        if requested.verdict == "unknown":
            raise NotFound("There is no delivery with this id, or its content is no longer stored.")
