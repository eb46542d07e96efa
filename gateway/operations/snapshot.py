"""What the operators' page shows, as types, and the figures it computes from counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gateway.events.catalogue import Time
from gateway.inference.availability import InferenceState
from gateway.operations.backlog import Queue, Worker
from gateway.operations.storage import DeadLetters, StorageByAccount
from gateway.settings import Plan
from gateway.telemetry.counters import TTFT, TTFT_FIELDS


class Process(msgspec.Struct):
    """A gateway process that lives."""

    id: str
    streams: int
    startedAt: Time
    seenAt: Time


class Minute(msgspec.Struct):
    minute: Time
    requests: int
    streams: int
    codes: dict[str, int]


class FirstToken(msgspec.Struct):
    """Milliseconds from a request to its first token; null without streams."""

    p50: int | None
    p99: int | None


class AccountSpend(msgspec.Struct):
    """Nano-euro of a UTC day."""

    account: str
    name: str
    plan: Plan
    cap: int
    settled: int
    reserved: int


class DaySpend(msgspec.Struct):
    """Nano-euro."""

    day: str
    total: int
    top: list[AccountSpend]


class RedisFigures(msgspec.Struct):
    """Sums of all nodes; memory in bytes, and a limit of 0 for none."""

    latencyMs: float
    memory: int
    memoryLimit: int
    clients: int
    commandsPerSecond: int


class WaitingAccount(msgspec.Struct):
    account: str
    name: str
    waiting: int  # requests


class ProviderShare(msgspec.Struct):
    """Requests at the provider and waiting for it, of all gateways."""

    bound: int  # in force; 0 for none
    used: int
    waiting: int
    top: list[WaitingAccount]


class Snapshot(msgspec.Struct):
    at: Time
    inference: InferenceState
    gateways: list[Process]
    minutes: list[Minute]  # of the last hour, oldest first; the last is the current one
    firstToken: FirstToken
    spend: DaySpend
    webhooks: Queue
    deploys: Queue
    workers: list[Worker]
    outcomes: dict[str, int]
    deadLetters: DeadLetters
    storage: StorageByAccount
    redis: RedisFigures
    provider: ProviderShare


def render_counts(minute: str, counts: Mapping[str, str]) -> Minute:
    codes = {name.removeprefix("code:"): int(n) for name, n in counts.items() if name.startswith("code:")}
    return Minute(f"{minute}:00.000Z", int(counts.get("requests", 0)), int(counts.get("streams", 0)), codes)


def first_token(minutes: Sequence[Mapping[str, str]]) -> FirstToken:
    counts = histogram(minutes)
    return FirstToken(quantile(counts, 0.5), quantile(counts, 0.99))


def histogram(minutes: Iterable[Mapping[str, str]]) -> list[int]:
    """Streams by their bucket of TTFT."""
    sums = [0] * len(TTFT_FIELDS)
    for counts in minutes:
        for n, field in enumerate(TTFT_FIELDS):
            sums[n] += int(counts.get(field, 0))
    return sums


def quantile(counts: Sequence[int], q: float) -> int | None:
    """Milliseconds, interpolated within a bucket. The last bucket has no upper end, so its lower end is returned."""
    rank = q * sum(counts)
    if not rank:
        return None
    below = 0
    for lower, upper, count in zip((0, *TTFT), TTFT, counts, strict=False):
        if count and below + count >= rank:
            return round(lower + (upper - lower) * (rank - below) / count)
        below += count
    return TTFT[-1]
