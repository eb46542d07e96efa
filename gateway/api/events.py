"""The account API: the account's webhook, and the log of its deliveries."""

from typing import Annotated, Literal

import msgspec
from litestar import delete, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from gateway.accounts.registry import Registry
from gateway.api.authentication import account_router
from gateway.api.resources import Caller, CallerAccess
from gateway.errors import NotFound, RateLimited, RequestMalformed
from gateway.events import deliveries
from gateway.events.catalog import SAMPLES
from gateway.events.deliveries import MAX_DELIVERIES, Delivery, DeliveryDetail, Filter
from gateway.events.records import Outcome
from gateway.events.webhooks import Webhooks
from gateway.ids import Time
from gateway.redis.client import Store
from gateway.services import Injected
from gateway.settings import Settings
from gateway.validation import parse_span


class WebhookUrl(msgspec.Struct, forbid_unknown_fields=True):
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2_048, extra_json_schema={"format": "uri"})]


class EventType(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, msgspec.Meta(max_length=128, extra_json_schema={"enum": list(SAMPLES)})]


class Webhook(msgspec.Struct):
    url: str
    createdAt: Time


class ShownWebhook(Webhook):
    previousSecretUntil: Time | msgspec.UnsetType = msgspec.UNSET  # for a day after a rotation, both secrets sign


class RotatedSecret(msgspec.Struct):
    secret: str  # shown only here


class ChangedWebhook(Webhook):
    secret: str | msgspec.UnsetType = msgspec.UNSET  # shown only here, when the URL is new


class EventId(msgspec.Struct):
    id: str


class FailedEvents(msgspec.Struct, forbid_unknown_fields=True):
    since: Annotated[str, msgspec.Meta(max_length=64, extra_json_schema={"format": "date-time"})]  # the events' time
    outcome: Literal["failed"]


class QueuedEvents(msgspec.Struct):
    count: int


@get("/webhook", summary="Show the webhook that receives the account's events", errors=[NotFound])
async def show_webhook(account: Caller, webhooks: Injected[Webhooks]) -> ShownWebhook:
    receiver = await webhooks.find_receiver(account.id)
    if receiver is None:
        raise NotFound("No webhook is set; PUT {url} here to set one.")
    ends = await webhooks.read_previous_secret_end(account.id)
    return ShownWebhook(receiver.url, receiver.createdAt, msgspec.UNSET if ends is None else ends)


@put("/webhook", errors=[RequestMalformed])
async def set_webhook(account: Caller, data: JSONBody[WebhookUrl], webhooks: Injected[Webhooks]) -> ChangedWebhook:
    """Set the webhook that receives the account's events.

    A new URL gets a new signing secret, which is shown only here.
    """
    receiver, secret = await webhooks.set_receiver(account.id, data.url)
    return ChangedWebhook(receiver.url, receiver.createdAt, msgspec.UNSET if secret is None else secret)


@delete("/webhook", summary="Clear the webhook and its signing secret")
async def clear_webhook(account: Caller, webhooks: Injected[Webhooks]) -> None:
    await webhooks.clear_receiver(account.id)


@post("/webhook/rotate", status_code=200, errors=[RequestMalformed, NotFound])
async def rotate_secret(account: Caller, webhooks: Injected[Webhooks]) -> RotatedSecret:
    """Make a new signing secret, which is shown only here.

    For 24 hours both secrets sign: `X-Service-Signature` uses the new one, and `webhook-signature` carries both
    signatures. If the secret is rotated again within that time, the last two secrets sign.
    """
    return RotatedSecret(await webhooks.rotate_secret(account.id))


@post("/webhook/test", status_code=202, errors=[RequestMalformed, RateLimited])
async def test_webhook(
    account: Caller,
    data: JSONBody[EventType],
    settings: Injected[Settings],
    registry: Injected[Registry],
    webhooks: Injected[Webhooks],
) -> EventId:
    """Send a sample event.

    Its data has `"sample": true`. Samples and redeliveries together are limited to 30 per minute.
    """
    apps = await registry.list_apps(account.id)
    app, domain = apps[0] if apps else None, settings.apps_domain
    return EventId(await webhooks.queue_sample(account, data.type, app, domain))


@get("/deliveries", errors=[RequestMalformed])
async def list_deliveries(
    account: Caller,
    store: Injected[Store],
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_DELIVERIES)] = 50,
    before: FromQuery[str] = "",
    event: Annotated[str | None, QueryParameter(name="type", schema_extra={"enum": list(SAMPLES)})] = None,
    app: FromQuery[str | None] = None,
    outcome: FromQuery[Outcome | None] = None,
    since: FromQuery[str | None] = None,
    until: FromQuery[str | None] = None,
) -> list[Delivery]:
    """List the results of deliveries, newest first.

    The log keeps the last 1,000 results for 30 days. `before` is the `attempt` or the `id` of the last row of the
    previous page. `type`, `app` (its name) and `outcome` select rows, and so do `since` (inclusive) and `until`
    (exclusive), which are times of delivery in the format of `GET /account/usage`.
    """
    if event is not None and event not in SAMPLES:
        raise RequestMalformed(f"type: choose one of {', '.join(SAMPLES)}.")
    chosen = Filter(event, app or None, outcome, parse_span(since, until))
    return await deliveries.list_deliveries(store, account.id, limit, before=before, chosen=chosen)


@get("/deliveries/{delivery_id:str}", errors=[NotFound])
async def show_delivery(access: CallerAccess, delivery_id: FromPath[str], store: Injected[Store]) -> DeliveryDetail:
    """Show a delivery, with the request and the receiver's response.

    The path takes an event's id, for its newest delivery, or an `attempt`. The values of signatures are left out.
    """
    found = await deliveries.read_delivery(store, access.account.id, delivery_id)
    access.require_app(found.app)
    return found


@post("/deliveries/redeliver", status_code=202, errors=[RequestMalformed, RateLimited])
async def redeliver_failed(account: Caller, data: JSONBody[FailedEvents], webhooks: Injected[Webhooks]) -> QueuedEvents:
    """Send again all events whose newest delivery failed.

    `since` is the earliest time of an event, in the format of `GET /account/usage`. At most 1,000 events are sent,
    oldest first, without those that already wait. An account can do this once per minute.
    """
    return QueuedEvents(await webhooks.redeliver_failed(account.id, data.since))


@post("/deliveries/{delivery_id:str}/redeliver", status_code=202, errors=[NotFound, RateLimited])
async def redeliver(account: Caller, delivery_id: FromPath[str], webhooks: Injected[Webhooks]) -> EventId:
    """Send an event again.

    The event keeps its id and gets a new timestamp and signature. Samples and redeliveries together are limited to 30
    per minute.
    """
    await webhooks.redeliver(account.id, delivery_id)
    return EventId(delivery_id)


ROUTES = [
    account_router(
        show_webhook,
        set_webhook,
        clear_webhook,
        rotate_secret,
        test_webhook,
        list_deliveries,
        show_delivery,
        redeliver_failed,
        redeliver,
    )
]
