"""What the operators' page shows, as types, and the figures it computes from counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gateway.events.catalog import Time
from gateway.inference.availability import InferenceState
from gateway.operations.backlog import Queue, Worker
from gateway.operations.storage import DeadLetters, StorageByAccount
from gateway.settings import Plan
from gateway.telemetry.counters import MODEL, TTFT, TTFT_FIELDS


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


class ModelFigures(msgspec.Struct):
    """Of the last hour."""

    model: str
    requests: int
    errors: int  # of the provider
    firstToken: FirstToken


class Troubles(msgspec.Struct):
    failedDeploys: int  # of the last 24 hours
    unhealthyApps: int
    missingWorkers: list[str]  # groups of which no worker lives; with an outside engine, two need none


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
    models: list[ModelFigures]
    troubles: Troubles


def render_counts(minute: str, counts: Mapping[str, str]) -> Minute:
    codes = {name.removeprefix("code:"): int(n) for name, n in counts.items() if name.startswith("code:")}
    return Minute(f"{minute}:00.000Z", int(counts.get("requests", 0)), int(counts.get("streams", 0)), codes)


def first_token(minutes: Sequence[Mapping[str, str]]) -> FirstToken:
    counts = histogram(minutes)
    return FirstToken(quantile(counts, 0.5), quantile(counts, 0.99))


def model_figures(minutes: Sequence[Mapping[str, str]]) -> list[ModelFigures]:
    """Of each model that was asked, by name."""
    fields = {name for counts in minutes for name in counts if name.startswith(MODEL)}
    models = sorted({name.removeprefix(MODEL).partition(":")[0] for name in fields})
    return [_figures_of(model, minutes) for model in models]


def _figures_of(model: str, minutes: Sequence[Mapping[str, str]]) -> ModelFigures:
    prefix = f"{MODEL}{model}:"
    requests, errors = (sum(int(counts.get(prefix + name, 0)) for counts in minutes) for name in ("requests", "errors"))
    counts = histogram(minutes, prefix)
    return ModelFigures(model, requests, errors, FirstToken(quantile(counts, 0.5), quantile(counts, 0.99)))


def histogram(minutes: Iterable[Mapping[str, str]], prefix: str = "") -> list[int]:
    """Streams by their bucket of TTFT; `prefix` is that of a model's fields."""
    sums = [0] * len(TTFT_FIELDS)
    for counts in minutes:
        for n, field in enumerate(TTFT_FIELDS):
            sums[n] += int(counts.get(prefix + field, 0))
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
