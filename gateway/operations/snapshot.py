"""The data of the operators' page, and the figures that are computed from counts."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gateway.deploys.pods import PodReport
from gateway.ids import Time
from gateway.inference.availability import InferenceState
from gateway.inference.providers import ProviderState
from gateway.operations.backlog import DeadLetters, Queue, StorageByAccount, Worker
from gateway.settings import Plan
from gateway.telemetry.counters import MODEL_PREFIX, TTFT_BUCKETS_MS, TTFT_FIELDS


class Process(msgspec.Struct):
    """A live gateway process."""

    id: str
    streams: int
    startedAt: Time
    seenAt: Time


class Minute(msgspec.Struct):
    minute: Time
    requests: int
    streams: int
    codes: dict[str, int]


class Hour(msgspec.Struct):
    """The requests to all accounts' apps."""

    hour: Time
    requests: int
    codes: dict[str, int]  # of requests that ended with an error
    nanoEuro: int


class FirstToken(msgspec.Struct):
    """Milliseconds from a request to its first token; null if there were no streams."""

    p50: int | None
    p99: int | None


class AccountSpend(msgspec.Struct):
    """An account's spend of a UTC day in nano-euro."""

    account: str
    name: str
    plan: Plan
    cap: int
    settled: int
    reserved: int


class DaySpend(msgspec.Struct):
    """The spend of a UTC day in nano-euro."""

    day: str
    total: int
    top: list[AccountSpend]


class RedisFigures(msgspec.Struct):
    """Sums of all nodes. Memory is in bytes; a limit of 0 means none."""

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
    """The requests of all gateways at all providers, and those that wait for one."""

    limit: int  # in force; 0 if a provider has none
    used: int
    waiting: int
    top: list[WaitingAccount]


class ModelFigures(msgspec.Struct):
    """The figures of a model for the last hour."""

    model: str
    requests: int
    errors: int  # of the provider
    firstToken: FirstToken


class NeedsAttention(msgspec.Struct):
    failedDeploys: int  # of the last 24 hours
    unhealthyApps: int
    missingWorkers: list[str]  # groups without a live worker; with an external engine, two groups need none


class ServiceSnapshot(msgspec.Struct):
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
    providers: list[ProviderState]
    models: list[ModelFigures]
    needsAttention: NeedsAttention
    pods: PodReport | None  # null unless apps run on Kubernetes


def render_counts(minute: str, counts: Mapping[str, str]) -> Minute:
    requests, streams = int(counts.get("requests", 0)), int(counts.get("streams", 0))
    return Minute(f"{minute}:00.000Z", requests, streams, read_codes(counts))


def render_hour(hour: str, counts: Mapping[str, str]) -> Hour:
    requests, settled = int(counts.get("requests", 0)), int(counts.get("settled", 0))
    return Hour(f"{hour}:00:00.000Z", requests, read_codes(counts), settled)


def read_codes(counts: Mapping[str, str]) -> dict[str, int]:
    return {name.removeprefix("code:"): int(n) for name, n in counts.items() if name.startswith("code:")}


def first_token(minutes: Sequence[Mapping[str, str]], prefix: str = "") -> FirstToken:
    """Returns the figures of all streams, or of those of the model to whose fields `prefix` belongs."""
    counts = histogram(minutes, prefix)
    return FirstToken(quantile(counts, 0.5), quantile(counts, 0.99))


def model_figures(minutes: Sequence[Mapping[str, str]]) -> list[ModelFigures]:
    """Returns the figures of each model that had requests, by name."""
    fields = {name for counts in minutes for name in counts if name.startswith(MODEL_PREFIX)}
    models = sorted({name.removeprefix(MODEL_PREFIX).partition(":")[0] for name in fields})
    return [_figures_of(model, minutes) for model in models]


def _figures_of(model: str, minutes: Sequence[Mapping[str, str]]) -> ModelFigures:
    prefix = f"{MODEL_PREFIX}{model}:"
    requests, errors = (sum(int(counts.get(prefix + name, 0)) for counts in minutes) for name in ("requests", "errors"))
    return ModelFigures(model, requests, errors, first_token(minutes, prefix))


def histogram(minutes: Iterable[Mapping[str, str]], prefix: str = "") -> list[int]:
    """Returns the number of streams in each bucket of `TTFT_BUCKETS_MS`. `prefix` selects the fields of a model."""
    sums = [0] * len(TTFT_FIELDS)
    for counts in minutes:
        for n, field in enumerate(TTFT_FIELDS):
            sums[n] += int(counts.get(prefix + field, 0))
    return sums


def quantile(counts: Sequence[int], q: float) -> int | None:
    """Returns milliseconds, interpolated within a bucket. The last bucket has no upper end, so its lower end counts."""
    rank = q * sum(counts)
    if not rank:
        return None
    below = 0
    for lower, upper, count in zip((0, *TTFT_BUCKETS_MS), TTFT_BUCKETS_MS, counts, strict=False):
        if count and below + count >= rank:
            return round(lower + (upper - lower) * (rank - below) / count)
        below += count
    return TTFT_BUCKETS_MS[-1]
