"""The log of an account's deliveries: the last 1,000 results of 30 days, each with the response for debugging.

An entry names its event. The event's data is stored once, in the account's bodies (`lua/events/deliveries.lua`). The
request is not stored: its body and headers follow from the event and the time of sending. Signatures are left out,
because anyone who has one can repeat the request until receivers consider it too old.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gateway.errors import NotFound, RequestMalformed
from gateway.events.records import LoggedEvent, Outcome
from gateway.ids import ALWAYS, Time, TimeSpan, now_iso, time_of
from gateway.keys import bodies_key, deliveries_key, partition_tag, stored_key
from gateway.redis.client import Store

MAX_DELIVERIES = 1_000  # kept per account
KEPT_SECONDS = 30 * 86_400
PAGE_ENTRIES = 100  # read at a time
SHARE_BYTES = 8_388_608  # for an account's log and the data of its events: `lua/events/deliveries.lua`
KEPT_BODY_BYTES = 1_024  # of a response
READ_BODY_BYTES = KEPT_BODY_BYTES + 128  # so that a secret at the end is read completely
CONCEALED_BYTES = 8  # the shortest start of a secret to leave out at the end of a text
KEPT_HEADER_CHARACTERS = 1_024  # of a response
NOT_KEPT = "(not kept)"

# An escaped ASCII character in JSON, a URL or HTML, perhaps escaped repeatedly; at the end also a part of an escape.
ESCAPE = re.compile(
    rb"(?<!\\)\\++(?:(?P<slash>/)|u00(?P<json>[0-9a-f]{2})|(?:u[0-9a-f]{0,3})?\Z)"
    rb"|%(?:(?:25)*(?P<url>[0-9a-f]{2})|[0-9a-f]?\Z)"
    rb"|&(?:(?:amp;)*#(?:x0*(?P<hex>[0-9a-f]{2})|0*(?P<decimal>[0-9]{2,3}));|[a-z0-9;#]*\Z)",
    re.IGNORECASE,
)


class Delivery(msgspec.Struct, kw_only=True):
    """The outcome of one delivery."""

    id: str  # of the event
    attempt: str  # identifies this delivery among those of the same event
    type: str
    app: str
    url: str | None  # to which it was sent; null if no webhook was set
    at: Time  # of the delivery
    eventAt: Time  # of the event
    durationMs: int
    outcome: Outcome
    sample: bool = False  # a test event
    redelivery: int = 0  # 1 for the event's first redelivery
    status: int | msgspec.UnsetType = msgspec.UNSET  # the receiver's
    error: str | msgspec.UnsetType = msgspec.UNSET


class SentRequest(msgspec.Struct):
    headers: dict[str, str]  # without the values of signatures; empty if nothing was sent
    body: str | None  # null if the event's data is no longer stored


class ReceivedResponse(msgspec.Struct):
    status: int
    headers: dict[str, str]  # the first 1,024 characters
    body: str  # its first KiB


class DeliveryDetail(Delivery, kw_only=True):
    """A delivery with the request and the receiver's response."""

    request: SentRequest
    response: ReceivedResponse | None  # null if the receiver did not answer


class Filter(msgspec.Struct, frozen=True):
    type: str | None = None
    app: str | None = None
    outcome: Outcome | None = None
    span: TimeSpan = ALWAYS  # of the deliveries

    def matches(self, fields: Mapping[str, str]) -> bool:
        return (
            self.span.contains(int(fields["at"]) / 1000)
            and self.type in (None, fields["type"])
            and self.app in (None, fields["app"])
            and self.outcome in (None, fields["outcome"])
        )


NO_FILTER = Filter()
Entry = tuple[str, dict[str, str]]  # the attempt, and its logged fields


async def list_deliveries(
    store: Store, account_id: str, limit: int, *, before: str = "", chosen: Filter = NO_FILTER
) -> list[Delivery]:
    """Returns deliveries, newest first. Raises RequestMalformed if `before` is not in the log.

    `before` is an attempt or the id of an event, or '' to begin with the newest.
    """
    found: list[Entry] = []
    after = before
    if before and not _is_attempt(before):
        logged = await _find(store, account_id, before)
        if not logged:
            raise RequestMalformed("before: there is no delivery of this id.")
        after = logged[-1][0]
    count = limit if chosen == NO_FILTER else PAGE_ENTRIES
    while len(found) < limit:
        page = await _read_page(store, account_id, after, count)
        found += [entry for entry in page if chosen.matches(entry[1])]
        if not page:
            break
        after = page[-1][0]
    return [msgspec.convert(_row(entry), Delivery, strict=False) for entry in found[:limit]]


async def read_delivery(store: Store, account_id: str, delivery_id: str) -> DeliveryDetail:
    """Returns the delivery of this attempt, or the newest one of this event. Raises NotFound."""
    found = await _find(store, account_id, delivery_id)
    if not found:
        raise NotFound("There is no delivery of this id in the last 30 days.")
    attempt, fields = found[0]
    data, timestamp = await store.client.hget(bodies_key(account_id), fields["id"]), int(fields["at"])
    body = None if data is None else encode_body(fields["id"], fields["type"], data, timestamp).decode()
    headers = build_headers(fields["id"], fields["type"], timestamp, NOT_KEPT, [NOT_KEPT]) if fields.get("url") else {}
    response = None
    if fields["status"]:
        answered = msgspec.json.decode(fields.get("headers") or "{}", type=dict[str, str])
        response = ReceivedResponse(int(fields["status"]), answered, fields.get("body", ""))
    detail = {"request": SentRequest(headers, body), "response": response}
    return msgspec.convert({**_row((attempt, fields)), **detail}, DeliveryDetail, strict=False)


async def find_failed(store: Store, account_id: str, since: int) -> list[LoggedEvent]:
    """Returns the events from `since` (ms) on whose newest delivery failed, oldest first."""
    newest: dict[str, dict[str, str]] = {}
    entries: Counter[str] = Counter()
    after = ""
    while page := await _read_page(store, account_id, after, PAGE_ENTRIES):
        for _, fields in page:
            newest.setdefault(fields["id"], fields)
            entries[fields["id"]] += 1
        after = page[-1][0]
    failed = [fields for fields in newest.values() if fields["outcome"] == "failed" and _event_time(fields) >= since]
    failed.reverse()  # of events of the same time, the first in the log comes first
    return [
        LoggedEvent(
            id=fields["id"],
            app=fields["app"],
            type=fields["type"],
            sample=bool(fields.get("sample")),
            redelivery=int(fields.get("redelivery") or 0),
            entries=entries[fields["id"]],
        )
        for fields in sorted(failed, key=_event_time)
    ]


async def count_stored_bytes(store: Store, account_id: str) -> int:
    """Returns the bytes that the account's log and the data of its events take, of `SHARE_BYTES`."""
    return int(await store.client.zscore(stored_key(partition_tag(account_id)), account_id) or 0)


def _row(entry: Entry) -> dict[str, str | None]:
    attempt, fields = entry
    optional = [name for name in ("status", "error", "sample", "redelivery") if fields.get(name)]
    row = {name: fields[name] for name in ("id", "type", "app", "durationMs", "outcome", *optional)}
    times = {"at": now_iso(int(fields["at"]) / 1000), "eventAt": now_iso(_event_time(fields) / 1000)}
    return {**row, **times, "attempt": attempt, "url": fields.get("url") or None}


def _event_time(fields: Mapping[str, str]) -> int:
    """Returns the event's time in milliseconds since the epoch."""
    return time_of(fields["id"]) or int(fields["at"])


def _is_attempt(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}-[0-9]{1,15}", text) is not None


async def _find(store: Store, account_id: str, delivery_id: str) -> list[Entry]:
    """Returns the entry of an attempt, or those of an event, newest first."""
    if _is_attempt(delivery_id):
        entries = await store.client.xrange(deliveries_key(account_id), delivery_id, delivery_id)
        return [entry for entry in entries if int(entry[0].partition("-")[0]) >= _oldest()]
    found: list[Entry] = []
    after = ""
    while page := await _read_page(store, account_id, after, PAGE_ENTRIES):
        found += [entry for entry in page if entry[1]["id"] == delivery_id]
        after = page[-1][0]
    return found


async def _read_page(store: Store, account_id: str, before: str, count: int) -> list[Entry]:
    last = f"({before}" if before else "+"
    page: list[Entry] = await store.client.xrevrange(
        deliveries_key(account_id), max=last, min=str(_oldest()), count=count
    )
    return page


def _oldest() -> int:
    return int((time.time() - KEPT_SECONDS) * 1000)


# -- requests and answers ------------------------------------------------------------------------------------


def encode_body(event_id: str, event_type: str, data: str, timestamp: int) -> bytes:
    """Returns the exact bytes to send. `timestamp` is in milliseconds."""
    return b'{"type":%b,"id":%b,"timestamp":%d,"data":%b}' % (
        msgspec.json.encode(event_type),
        msgspec.json.encode(event_id),
        timestamp,
        data.encode(),
    )


def build_headers(
    event_id: str, event_type: str, timestamp: int, signature: str, standard: Sequence[str]
) -> dict[str, str]:
    """Returns the request's headers. `timestamp` is in milliseconds.

    `signature` is our own. `standard` are those of Standard Webhooks, whose timestamps are in seconds.
    """
    return {
        "Content-Type": "application/json",
        "X-Service-Event": event_type,
        "X-Service-Delivery": event_id,
        "X-Service-Timestamp": str(timestamp),
        "X-Service-Signature": f"sha256={signature}",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp // 1000),
        "webhook-signature": " ".join(f"v1,{each}" for each in standard),
    }


def summarize_answer(headers: Iterable[tuple[str, str]], body: bytes, secrets: Sequence[str]) -> tuple[str, str]:
    """Returns the parts of a response that the log keeps: its first headers as JSON, the start of its body as text.

    Both leave out the `secrets`: a receiver may print its environment, or echo the request.
    """
    kept: dict[str, str] = {}
    room = KEPT_HEADER_CHARACTERS
    for name, value in headers:
        room -= len(name) + len(value)
        if room < 0:
            break
        # The client decodes bytes that are not UTF-8 as surrogates, which JSON cannot hold.
        text = _without(value.encode(errors="surrogateescape"), secrets).decode(errors="replace")
        kept[name] = f"{kept[name]}, {text}" if name in kept else text
    text = _without(body, secrets)[:KEPT_BODY_BYTES].decode(errors="replace") if body else ""
    return msgspec.json.encode(kept).decode() if kept else "", text


def _without(text: bytes, secrets: Sequence[str]) -> bytes:
    """Replaces the secrets. If one is escaped, all of the text is returned without its escapes."""
    kept = _replace(text, secrets)
    plain = ESCAPE.sub(_unescape, kept)
    found = _replace(plain, secrets)
    return kept if found == plain else found


def _replace(text: bytes, secrets: Sequence[str]) -> bytes:
    """Replaces the secrets, and the start of one at the end: the answer may have been cut off within it."""
    for secret in map(str.encode, secrets):
        text = text.replace(secret, NOT_KEPT.encode())
        start = text.rfind(secret[:CONCEALED_BYTES])
        if start >= 0 and secret.startswith(text[start:]):
            text = text[:start] + NOT_KEPT.encode()
    return text


def _unescape(escape: re.Match[bytes]) -> bytes:
    match escape.lastgroup:
        case "slash":
            return b"/"
        case "json" | "url" | "hex" as group:
            return chr(int(escape[group], 16)).encode()
        case "decimal" as group:
            return chr(int(escape[group])).encode()
    return b""
