"""Checks every guarantee against the records of the run. Each check returns its violations as sentences.

No check relies on figures from the gateways. The cost of a request follows from the provider's bill (`Paid`), the
answer that the caller received (`Answer`), and the faults at that time (`Disturbance`):

| request | settled at |
| --- | --- |
| complete at the provider and at the caller | its cost, to the nano-euro |
| refused before it reached the provider | nothing |
| abandoned by a caller who already had tokens | its maximum cost |
| disturbed by a fault | from the provider's bill to the maximum cost; from 0 if the fault may have hidden the answer |
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from redis.crc import key_slot

from gateway.keys import app_key, partition_tag
from tests.chaos.load import NOT_REPLICATED, Answer, max_cost
from tests.chaos.nodes import Slots
from tests.support.prices import cost

KILLED = "kill gateway"
NOT_CONNECTED = "ClientConnectorError"  # no byte of the request was sent
DELIVERY_SECONDS = 2.0  # at most, from sending an event to its arrival, and from its arrival to the record in Redis
WINDOW_SECONDS = 60.0  # of a rate limit
TAKEOVERS = {"kill primary", "stop primary", "fail over"}  # workers wait for no replica, so these may lose their writes
OWN_FAILURE = re.compile(r"GET / returned|command|output")  # errors of deploys that no injected fault causes
MIN_CLAIM_SECONDS = 3.0  # no other worker can claim an event sooner, because its worker renews the claim in time
ALLOWED = {
    (200, ""),
    (400, "REQUEST_MALFORMED"),
    (402, "SPEND_CAP_REACHED"),
    (429, "APP_RATE_LIMITED"),
    (429, "USER_RATE_LIMITED"),
    (503, NOT_REPLICATED),  # on a busy machine, a replica may confirm later than the gateway waits
}
REDIS_DOWN = {(503, "BACKBONE_UNAVAILABLE"), (503, "PROVIDER_QUOTA_EXHAUSTED")}
PROVIDER_DOWN = {"PROVIDER_UNREACHABLE": 502, "PROVIDER_ERROR": 502, "PROVIDER_TIMEOUT": 504}


@dataclass(frozen=True)
class Paid:
    """An entry of the provider's bill. `cut`: a fault of the provider's link ended the answer."""

    number: int
    input: int
    output: int
    whole: bool
    cut: bool

    @property
    def cost(self) -> int:
        """The cost in nano-euro, which is 0 if the provider produced nothing."""
        return cost(self.input, self.output) if self.output else 0


@dataclass
class Disturbance:
    """A fault, from its start until everything had recovered from it, in seconds of `time.monotonic`.

    `slots`: the affected slots of Redis; None for all. `process`: the killed process, which starts again.
    """

    kind: str
    target: str
    begin: float
    end: float = float("inf")
    redis: bool = False
    slots: Slots | None = None
    process: str | None = None

    def overlaps(self, begin: float, end: float) -> bool:
        return self.begin - 1 <= end and begin <= self.end

    def affects(self, slots: Iterable[int]) -> bool:
        return self.slots is None or any(first <= slot <= last for slot in slots for first, last in self.slots)


def select_during(faults: Iterable[Disturbance], begin: float, end: float) -> list[Disturbance]:
    return [fault for fault in faults if fault.overlaps(begin, end)]


def select_affecting(faults: Iterable[Disturbance], account: str, app: str = "") -> list[Disturbance]:
    """Returns the faults without those of Redis that affect neither the account's partition nor the app's record."""
    slots = _compute_slots(account, app)
    return [fault for fault in faults if not fault.redis or fault.affects(slots)]


@functools.lru_cache(10_000)
def _compute_slots(account: str, app: str) -> tuple[int, ...]:
    own = key_slot(partition_tag(account).encode())
    return (own, key_slot(app_key(app).encode())) if app else (own,)


# -- answers -------------------------------------------------------------------------------------------------


def check_answer(answer: Answer, faults: Sequence[Disturbance]) -> list[str]:
    """Checks that the answer is a documented one, and that a failed request met a fault that explains the failure."""
    met = select_affecting(select_during(faults, answer.start, answer.end), answer.account, answer.app)
    at_gateway = any(fault.target == f"gateway-{answer.gateway + 1}" for fault in met)
    at_redis = any(fault.redis for fault in met)
    at_provider = any(fault.target == "provider" for fault in met)
    request = f"request {answer.number} of {answer.app}"
    if not answer.faithful:
        return [f"{request} ended as {answer.ending!r} with another text than the provider gave"]
    outcome = (answer.status, answer.code)
    if answer.ending in ("none", "cut"):
        verb = "got no answer" if answer.ending == "none" else "was cut off without done or error"
        return (
            [] if at_gateway else [f"{request} {verb} ({answer.code}), and gateway-{answer.gateway + 1} met no fault"]
        )
    if outcome in ALLOWED and (answer.code != "REQUEST_MALFORMED" or not answer.body):
        return []
    if outcome in REDIS_DOWN:
        return [] if at_redis or at_gateway else [f"{request} got {outcome} without a fault of Redis"]
    if answer.code in PROVIDER_DOWN and (answer.ending == "error" or answer.status == PROVIDER_DOWN[answer.code]):
        return [] if at_provider or at_gateway else [f"{request} got {outcome} without a fault of the provider"]
    return [f"{request} got {outcome}, ended as {answer.ending!r}"]


# -- money ---------------------------------------------------------------------------------------------------


def compute_settlement_range(
    answer: Answer, paid: Paid | None, faults: Sequence[Disturbance], *, linger: float = 3
) -> tuple[int, int]:
    """Returns the minimum and the maximum nano-euro at which the request may be settled.

    `linger`: seconds after a fault of Redis during which the settlement may still wait in its gateway.
    """
    if not answer.body or answer.code == NOT_CONNECTED:
        return 0, 0
    met = select_affecting(select_during(faults, answer.start, answer.end + 1), answer.account)
    last = max([answer.end + 0.5, *(fault.end + linger for fault in met if fault.redis)])
    killed = any(
        fault.kind == KILLED
        and fault.target == f"gateway-{answer.gateway + 1}"
        and answer.start - 0.5 <= fault.begin <= last
        for fault in faults
    )
    # If a gateway dies with a waiting settlement, the reservation is settled at its maximum cost. If Redis loses a
    # settlement, the gateway repeats it at the request's cost.
    if paid is None:
        return 0, 0 if answer.ending == "refused" and not killed else max_cost()
    if paid.whole and answer.ending in ("done", "whole"):
        return paid.cost, max_cost() if killed else paid.cost
    if paid.whole:
        return paid.cost, max_cost()
    if answer.tokens and not killed:
        return max_cost(), max_cost()
    if paid.cut or any(fault.target == "provider" for fault in met):
        return 0, max_cost()
    return paid.cost, max_cost()


def check_unpaid(answer: Answer, paid: Paid | None) -> list[str]:
    if answer.ending in ("done", "whole") and (paid is None or not paid.whole):
        return [f"request {answer.number} was answered whole, and the provider did not answer it so"]
    return []


def check_spend(account: str, spend: tuple[int, int], least: int, most: int) -> list[str]:
    """Checks the account's total spend. `spend`: settled and reserved nano-euro of all days."""
    total = sum(spend)
    if total < least:
        return [f"{account} was settled at {total:,} nano-euro, {least - total:,} less than the least possible"]
    if total > most:
        return [f"{account} was settled at {total:,} nano-euro, {total - most:,} more than the most possible"]
    return []


def check_cap(account: str, day: str, settled: int, reserved: int, cap: int) -> list[str]:
    found = []
    if settled + reserved > cap:
        found.append(f"{account} has settled {settled:,} and reserved {reserved:,} on {day}, above its cap of {cap:,}")
    if settled < 0 or reserved < 0:
        found.append(f"{account} has settled {settled:,} and reserved {reserved:,} on {day}, below 0")
    return found


# -- rates ---------------------------------------------------------------------------------------------------


def count_fullest_window(admitted: Sequence[tuple[float, float]]) -> int:
    """Returns the largest number of requests that certainly passed within one window.

    `admitted`: when each request was sent and answered. It passed between these times, so it counts for a window only
    if both lie in the window.
    """
    sent, answered = sorted(start for start, _ in admitted), sorted(first for _, first in admitted)
    most = 0
    for begin in sent:
        outside = (
            bisect.bisect_left(sent, begin) + len(answered) - bisect.bisect_right(answered, begin + WINDOW_SECONDS)
        )
        most = max(most, len(admitted) - outside)
    return most


def check_window(name: str, admitted: Sequence[tuple[float, float]], limit: int) -> list[str]:
    if len(admitted) <= limit:
        return []
    most = count_fullest_window(admitted)
    return [f"{name} passed {most} requests in a minute, above its limit of {limit}"] if most > limit else []


# -- events --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    account: str
    event: str
    at: float
    verified: bool


def check_events(
    accepted: Mapping[str, float],
    received: Sequence[Received],
    failed: Collection[str],
    faults: Sequence[Disturbance],
    *,
    claim: float = 30,
) -> list[str]:
    """Checks that each event was delivered with a valid signature, and not twice without a reason.

    `accepted`: the time of each event. `failed`: the events whose log says that they were not delivered. An event may
    arrive again only if the delivery before coincided with a fault of a sending worker, its partition or the receiver.
    If a worker dies with an event, another one claims it up to `claim` seconds later.
    """
    found = [f"event {entry.event} came with a wrong signature" for entry in received if not entry.verified]
    times: dict[str, list[float]] = {}
    accounts = {entry.event: entry.account for entry in received}
    for entry in received:
        times.setdefault(entry.event, []).append(entry.at)
    for event, at in accepted.items():
        if event in times:
            continue
        if event in failed and any(fault.target == "receiver" for fault in select_during(faults, at, at + claim)):
            continue
        found.append(f"event {event} was {'given up' if event in failed else 'lost'}")
    for event, several in times.items():
        if len(several) > 1:
            found += _check_repetition(event, sorted(several), select_affecting(faults, accounts[event]))
    return found


def _check_repetition(event: str, times: Sequence[float], faults: Sequence[Disturbance]) -> list[str]:
    for earlier, later in itertools.pairwise(times):
        met = select_during(faults, earlier - DELIVERY_SECONDS, earlier + DELIVERY_SECONDS)
        workers = [fault for fault in met if fault.target.startswith("webhooks")]
        claimable = any(fault.kind == "kill worker" for fault in workers)
        if later - earlier < MIN_CLAIM_SECONDS and not claimable:
            return [f"event {event} came twice within {later - earlier:.1f} s, before another worker may claim it"]
        if not (workers or any(fault.redis or fault.target == "receiver" for fault in met)):
            return [f"event {event} came {len(times)} times, and nothing had failed when it came before"]
    return []


# -- deploys -------------------------------------------------------------------------------------------------

FINAL = {"live", "failed", "canceled"}
EVENT_OF = {"live": "deploy.succeeded", "failed": "deploy.failed"}


@dataclass(frozen=True)
class Ended:
    """The outcome of a deploy as its account sees it, with its start and end in seconds of `time.monotonic`."""

    state: str
    begin: float = 0.0
    end: float = 0.0
    error: str = ""


def check_deploy(
    deploy: str,
    account: str,
    ended: Ended | None,
    at: float,
    events: Iterable[tuple[str, str]],
    faults: Sequence[Disturbance],
) -> list[str]:
    """Checks that a deploy ended once, with one matching event.

    `events`: id and type of the events that name the deploy. The same event may arrive twice. A deploy may fail only
    because of a fault between its start and its end: of its partition, or of a worker that builds or serves.
    """
    faults = select_affecting(faults, account)
    if ended is None:
        return [f"deploy {deploy} is lost"]
    if ended.state not in FINAL:
        return [f"deploy {deploy} never ended: it is {ended.state}"]
    kinds = Counter(kind for _, kind in {*events})
    expected = Counter([EVENT_OF[ended.state]] if ended.state in EVENT_OF else [])
    if kinds - expected:
        return [f"deploy {deploy} ended as {ended.state}, and sent {dict(kinds)}"]
    causes = [
        fault
        for fault in select_during(faults, ended.begin, ended.end)
        if fault.redis or fault.target.startswith(("deploys", "sites"))
    ]
    if ended.state == "failed" and (not causes or OWN_FAILURE.search(ended.error)):
        met = ", ".join(sorted({fault.kind for fault in causes})) or "nothing"
        return [f"deploy {deploy} failed ({ended.error}), and no fault explains it: it met {met}"]
    undelivered = [
        fault
        for fault in select_during(faults, at, at + 180)
        if fault.kind in TAKEOVERS or fault.target == "receiver" or fault.target.startswith("webhooks")
    ]
    if expected - kinds and not undelivered:
        return [f"deploy {deploy} ended as {ended.state}, and sent no event"]
    return []


# -- secrets -------------------------------------------------------------------------------------------------

# Redis holds ciphertexts in base64url, in which "csk_" may occur by chance, but not within the first 12 characters.
PATTERNS = {
    "an API key": re.compile(rb"(?<![A-Za-z0-9_-]{12})csk_[A-Za-z0-9_-]{20}"),
    "a webhook's secret": re.compile(rb"whsec_[A-Za-z0-9+/]{20}"),
    "a hook's address": re.compile(rb"/hooks/deploy/[A-Za-z0-9_-]{40}"),
}


FAULT_SIGNS = (b"Traceback", b"never retrieved", b"never awaited", b"Unclosed")


def check_log(where: str, data: bytes) -> list[str]:
    """Checks a log of the service. Failures of other systems take one line, so a traceback is a violation."""
    return [f"{where} has a line with '{sign.decode()}'" for sign in FAULT_SIGNS if sign in data]


def check_secrets(where: str, data: bytes, secrets: Mapping[str, bytes]) -> list[str]:
    """Checks that the data holds no secret. `secrets`: texts by name. A violation gives the name, never the text."""
    found = [name for name, text in secrets.items() if text in data]
    found += [name for name, pattern in PATTERNS.items() if pattern.search(data)]
    return [f"{where} holds {name}" for name in found]
