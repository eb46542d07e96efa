"""What must hold, told from what the recorders saw. Every check returns the violations that it found, as sentences.

The gateways' own word counts for nothing here. A request's cost is judged by what the provider was paid for it
(`Paid`), how its caller saw it end (`Answer`), and which faults were under way (`Disturbance`):

| the request | is settled at |
| --- | --- |
| ended whole, at the provider and at the caller | its cost, to the nano-euro |
| was refused before it reached the provider | nothing |
| was left by a caller who had tokens already | the bound |
| met a fault | from what the provider was paid for to the bound; from 0 if the fault may have hidden the answer |
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

from gateway.accounts.keys import app_key
from gateway.redis.partitions import partition_tag
from tests.chaos.load import NOT_REPLICATED, Answer
from tests.chaos.nodes import Slots
from tests.chaos.prompts import bound, cost

KILLED = "kill gateway"
NOT_CONNECTED = "ClientConnectorError"  # no byte of the request was sent
DELIVERY = 2.0  # seconds from an event's arrival to the note of it in Redis, at most, and from its departure
WINDOW = 60.0  # seconds of a rate's window
TAKEOVERS = {"kill primary", "stop primary", "fail over"}  # workers wait for no replica, so these may lose their writes
OWN_FAILURE = re.compile(r"GET / was answered with|command|output")  # of a deploy, which no fault of ours causes
CLAIMED_AFTER = 3.0  # seconds that an event is one worker's own, at least, because it renews its hold in time
ALLOWED = {
    (200, ""),
    (400, "REQUEST_MALFORMED"),
    (402, "SPEND_CAP_REACHED"),
    (429, "APP_RATE_LIMITED"),
    (429, "USER_RATE_LIMITED"),
    (503, NOT_REPLICATED),  # a replica on a busy machine may take longer than GATEWAY_REDIS_WAIT waits
}
REDIS_DOWN = {(503, "BACKBONE_UNAVAILABLE"), (503, "PROVIDER_QUOTA_EXHAUSTED")}
PROVIDER_DOWN = {"PROVIDER_UNREACHABLE": 502, "PROVIDER_ERROR": 502, "PROVIDER_TIMEOUT": 504}


@dataclass(frozen=True)
class Paid:
    """What the provider was paid for; `cut`: a fault of the provider's link ended the answer."""

    number: int
    input: int
    output: int
    whole: bool
    cut: bool

    @property
    def cost(self) -> int:
        """A request that produced nothing costs nothing."""
        return cost(self.input, self.output) if self.output else 0


@dataclass(frozen=True)
class Disturbance:
    """A fault, from its beginning until everything had recovered from it, in seconds of `time.monotonic`.

    `lossy`: Redis may have lost what it had acknowledged to a gateway. `clock`: its clock was not the true one.
    `slots`: what of Redis it hit; None for all.
    """

    kind: str
    target: str
    begin: float
    end: float = float("inf")
    redis: bool = False
    lossy: bool = False
    clock: bool = False
    slots: Slots | None = None

    def touches(self, begin: float, end: float) -> bool:
        return self.begin - 1 <= end and begin <= self.end

    def hits(self, slots: Iterable[int]) -> bool:
        return self.slots is None or any(first <= slot <= last for slot in slots for first, last in self.slots)


def during(faults: Iterable[Disturbance], begin: float, end: float) -> list[Disturbance]:
    return [fault for fault in faults if fault.touches(begin, end)]


def concerning(faults: Iterable[Disturbance], account: str, app: str = "") -> list[Disturbance]:
    """Without those of Redis that hit nothing of the account, nor the app's record."""
    slots = _slots(account, app)
    return [fault for fault in faults if not fault.redis or fault.hits(slots)]


@functools.lru_cache(10_000)
def _slots(account: str, app: str) -> tuple[int, ...]:
    own = key_slot(partition_tag(account).encode())
    return (own, key_slot(app_key(app).encode())) if app else (own,)


# -- answers -------------------------------------------------------------------------------------------------


def check_answer(answer: Answer, faults: Sequence[Disturbance]) -> list[str]:
    """A request may fail only as the interface says, and only during a fault that explains it."""
    met = concerning(during(faults, answer.start, answer.end), answer.account, answer.app)
    at_gateway = any(fault.target == f"gateway-{answer.gateway + 1}" for fault in met)
    at_redis = any(fault.redis for fault in met)
    at_provider = any(fault.target == "provider" for fault in met)
    who = f"request {answer.number} of {answer.app}"
    if not answer.faithful:
        return [f"{who} ended as {answer.ending!r} with another text than the provider gave"]
    outcome = (answer.status, answer.code)
    if answer.ending in ("none", "cut"):
        verb = "got no answer" if answer.ending == "none" else "was cut off without done or error"
        return [] if at_gateway else [f"{who} {verb} ({answer.code}), and gateway-{answer.gateway + 1} met no fault"]
    if outcome in ALLOWED and (answer.code != "REQUEST_MALFORMED" or not answer.body):
        return []
    if outcome in REDIS_DOWN:
        return [] if at_redis or at_gateway else [f"{who} got {outcome} without a fault of Redis"]
    if answer.code in PROVIDER_DOWN and (answer.ending == "error" or answer.status == PROVIDER_DOWN[answer.code]):
        return [] if at_provider or at_gateway else [f"{who} got {outcome} without a fault of the provider"]
    return [f"{who} got {outcome}, ended as {answer.ending!r}"]


# -- money ---------------------------------------------------------------------------------------------------


def settled_at(
    answer: Answer, paid: Paid | None, faults: Sequence[Disturbance], *, linger: float = 3
) -> tuple[int, int]:
    """The least and the most nano-euro that the request may be settled at.

    `linger`: seconds after the end of a fault of Redis in which its settlement may still wait in its gateway.
    """
    if not answer.body or answer.code == NOT_CONNECTED:
        return 0, 0
    met = concerning(during(faults, answer.start, answer.end + 1), answer.account)
    last = max([answer.end + 0.5, *(fault.end + linger for fault in met if fault.redis)])
    killed = any(
        fault.kind == KILLED
        and fault.target == f"gateway-{answer.gateway + 1}"
        and answer.start - 0.5 <= fault.begin <= last
        for fault in faults
    )
    # A settlement that died with the gateway in which it waited is repeated at the bound when the lease ends; and so is
    # one whose lease ended early, by a step of the clock. One that Redis lost, the gateway repeats at its cost.
    unsure = killed or any(fault.clock for fault in met)
    if killed and any(fault.lossy for fault in met):
        return 0, bound()  # nobody is left who knows of it
    if paid is None:
        return 0, 0 if answer.ending == "refused" and not unsure else bound()
    if paid.whole and answer.ending in ("done", "whole"):
        return paid.cost, bound() if unsure else paid.cost
    if paid.whole:
        return paid.cost, bound()
    if answer.tokens and not unsure:
        return bound(), bound()
    if paid.cut or any(fault.target == "provider" for fault in met):
        return 0, bound()
    return paid.cost, bound()


def check_unpaid(answer: Answer, paid: Paid | None) -> list[str]:
    if answer.ending in ("done", "whole") and (paid is None or not paid.whole):
        return [f"request {answer.number} was answered whole, and the provider did not answer it so"]
    return []


def check_spend(account: str, spend: tuple[int, int], least: int, most: int) -> list[str]:
    """`spend`: settled and reserved nano-euro of all days."""
    total = sum(spend)
    if total < least:
        return [f"{account} was settled at {total:,} nano-euro, {least - total:,} less than the least possible"]
    if total > most:
        return [f"{account} was settled at {total:,} nano-euro, {total - most:,} more than the most possible"]
    return []


def check_cap(account: str, day: str, settled: int, reserved: int, cap: int, forgotten: int = 0) -> list[str]:
    """`forgotten`: requests of which Redis may have lost the reservation."""
    found = []
    if settled + reserved > cap + forgotten * bound():
        found.append(f"{account} has settled {settled:,} and reserved {reserved:,} on {day}, above its cap of {cap:,}")
    if settled < 0 or reserved < 0:
        found.append(f"{account} has settled {settled:,} and reserved {reserved:,} on {day}, below 0")
    return found


# -- rates ---------------------------------------------------------------------------------------------------


def fullest_window(admitted: Sequence[tuple[float, float]]) -> int:
    """How many requests surely passed within one window; each is given by when it was sent and when it was answered.

    A request passed between these two times, so a request counts for a window only if both lie in it.
    """
    sent, answered = sorted(start for start, _ in admitted), sorted(first for _, first in admitted)
    most = 0
    for begin in sent:
        outside = bisect.bisect_left(sent, begin) + len(answered) - bisect.bisect_right(answered, begin + WINDOW)
        most = max(most, len(admitted) - outside)
    return most


def check_window(
    name: str, admitted: Sequence[tuple[float, float]], limit: int, faults: Sequence[Disturbance]
) -> list[str]:
    """A clock that is stepped forward ends windows early: twice the limit may pass."""
    if len(admitted) <= limit:
        return []
    limit += count_forgotten(admitted, faults)
    most = fullest_window(admitted)
    begin, end = min(start for start, _ in admitted), max(first for _, first in admitted)
    if any(fault.clock for fault in during(faults, begin, end)):
        limit *= 2
    return [f"{name} passed {most} requests in a minute, above its limit of {limit}"] if most > limit else []


def count_forgotten(admitted: Iterable[tuple[float, float]], faults: Iterable[Disturbance]) -> int:
    """Requests, each given by when it was sent and answered, that Redis may have admitted and forgotten."""
    lossy = [fault for fault in faults if fault.lossy]
    return sum(any(fault.touches(*times) for fault in lossy) for times in admitted)


# -- events --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    account: str
    event: str
    at: float
    verified: bool


def check_events(
    accepted: Mapping[str, tuple[float, str]],
    received: Sequence[Received],
    failed: Collection[str],
    faults: Sequence[Disturbance],
    *,
    claim: float = 30,
) -> list[str]:
    """`accepted`: when each event was, and its account; `failed`: those whose log says that they were not delivered.

    An event comes again only if a fault met it when it came before: a fault of a worker that sends, of its partition,
    or of the receiver. A worker that died with an event shows up to `claim` seconds later, when another one claims it.
    """
    found = [f"event {entry.event} came with a wrong signature" for entry in received if not entry.verified]
    times: dict[str, list[float]] = {}
    accounts = {entry.event: entry.account for entry in received}
    for entry in received:
        times.setdefault(entry.event, []).append(entry.at)
    for event, (at, account) in accepted.items():
        if event in times:
            continue
        if event in failed and any(fault.target == "receiver" for fault in during(faults, at, at + claim)):
            continue
        if any(fault.lossy for fault in concerning(during(faults, at, at + 1), account)):
            continue
        found.append(f"event {event} was {'given up' if event in failed else 'lost'}")
    for event, several in times.items():
        if len(several) > 1:
            found += _check_again(event, sorted(several), concerning(faults, accounts[event]))
    return found


def _check_again(event: str, times: Sequence[float], faults: Sequence[Disturbance]) -> list[str]:
    for earlier, later in itertools.pairwise(times):
        met = during(faults, earlier - DELIVERY, earlier + DELIVERY)
        workers = [fault for fault in met if fault.target.startswith("webhooks")]
        if later - earlier < CLAIMED_AFTER and not any(fault.kind == "kill worker" for fault in workers):
            return [f"event {event} came twice within {later - earlier:.1f} s, before another worker may claim it"]
        if not (workers or any(fault.redis or fault.target == "receiver" for fault in met)):
            return [f"event {event} came {len(times)} times, and nothing had failed when it came before"]
    return []


# -- deploys -------------------------------------------------------------------------------------------------

FINAL = {"live", "failed", "canceled"}
EVENT_OF = {"live": "deploy.succeeded", "failed": "deploy.failed"}


@dataclass(frozen=True)
class Ended:
    """What the service says of a deploy: from its start to its end, in seconds of `time.monotonic`."""

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
    """`events`: id and type of those that name it. The same event may come twice; two events may not.

    It may fail only by a fault that it met between its start and its end: of its partition, of the storage, or of a
    worker that builds or serves.
    """
    faults = concerning(faults, account)
    if ended is None:
        return [] if any(fault.lossy for fault in during(faults, at, at + 1)) else [f"deploy {deploy} is lost"]
    if ended.state not in FINAL:
        return [f"deploy {deploy} never ended: it is {ended.state}"]
    kinds = Counter(kind for _, kind in {*events})
    expected = Counter([EVENT_OF[ended.state]] if ended.state in EVENT_OF else [])
    if kinds - expected:
        return [f"deploy {deploy} ended as {ended.state}, and sent {dict(kinds)}"]
    causes = [
        fault
        for fault in during(faults, ended.begin, ended.end)
        if fault.redis or fault.target == "storage" or fault.target.startswith(("deploys", "sites"))
    ]
    if ended.state == "failed" and (not causes or OWN_FAILURE.search(ended.error)):
        met = ", ".join(sorted({fault.kind for fault in causes})) or "nothing"
        return [f"deploy {deploy} failed ({ended.error}), and no fault explains it: it met {met}"]
    undelivered = [
        fault
        for fault in during(faults, at, at + 180)
        if fault.kind in TAKEOVERS or fault.target == "receiver" or fault.target.startswith("webhooks")
    ]
    if expected - kinds and not undelivered:
        return [f"deploy {deploy} ended as {ended.state}, and sent no event"]
    return []


# -- secrets -------------------------------------------------------------------------------------------------

PATTERNS = {
    "an API key": re.compile(rb"csk_[A-Za-z0-9_-]{20}"),
    "a webhook's secret": re.compile(rb"whsec_[A-Za-z0-9+/]{20}"),
    "a hook's address": re.compile(rb"/hooks/deploy/[A-Za-z0-9_-]{40}"),
}


FAULT_SIGNS = (b"Traceback", b"never retrieved", b"never awaited", b"Unclosed")


def check_log(where: str, data: bytes) -> list[str]:
    """Of a process of the service: faults of others are logged in one line."""
    return [f"{where} has a line with '{sign.decode()}'" for sign in FAULT_SIGNS if sign in data]


def check_secrets(where: str, data: bytes, secrets: Mapping[str, bytes]) -> list[str]:
    """`secrets`: texts by what they are. What was found is named, and never quoted."""
    found = [name for name, text in secrets.items() if text in data]
    found += [name for name, pattern in PATTERNS.items() if pattern.search(data)]
    return [f"{where} holds {name}" for name in found]
