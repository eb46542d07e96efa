"""What the routes answer, as types: the API's description is made of them, and a test holds the answers to it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.accounts.records import Build
from gateway.deploys.states import State, Trigger
from gateway.events.catalogue import Kind, Time

Plan = Literal["free", "starter", "maker", "max"]


class ErrorDetail(msgspec.Struct):
    code: str
    message: str  # says what to do next
    requestId: str


class Error(msgspec.Struct):
    error: ErrorDetail


class Usage(msgspec.Struct):
    inputTokens: int
    outputTokens: int


class Answer(msgspec.Struct):
    """The whole completion."""

    text: str
    model: str
    finishReason: Literal["stop", "length", "content_filter"]
    usage: Usage | None  # null when the provider reported none


class Limits(msgspec.Struct):
    requestsPerMinutePerApp: int
    requestsPerMinutePerUser: int
    maxRequestBytes: int
    maxOutputTokens: int
    deploysPerDay: int | msgspec.UnsetType = msgspec.UNSET  # an account's


class Features(msgspec.Struct):
    managedInference: bool


class Platform(msgspec.Struct):
    features: Features


InferenceStatus = Literal["disabled", "misconfigured", "quota-exhausted", "provider-unreachable", "operational"]


class Capabilities(msgspec.Struct):
    platform: Platform
    managedInferenceStatus: InferenceStatus
    models: list[str]
    defaultModel: str
    limits: Limits


class Inference(msgspec.Struct):
    managedInference: bool
    managedInferenceStatus: InferenceStatus
    enabled: bool
    approved: bool
    emergencyOff: bool


class Spend(msgspec.Struct):
    """Nano-euro of a UTC day."""

    day: str
    settled: int
    reserved: int
    cap: int


class Account(msgspec.Struct):
    id: str
    name: str
    plan: Plan
    limits: Limits
    spend: Spend
    deploysToday: int


class AccountRecord(msgspec.Struct):
    id: str
    name: str
    plan: Plan
    createdAt: Time


class NewKey(msgspec.Struct):
    id: str
    apiKey: str  # shows only here


class Hour(msgspec.Struct):
    hour: Time
    requests: int
    refused: int
    inputTokens: int
    outputTokens: int


class OpenFindings(msgspec.Struct):
    red: int
    yellow: int


class App(msgspec.Struct):
    id: str
    name: str
    url: str
    customDomain: str | None
    customDomainVerified: bool
    status: Literal["live", "never-live"]
    health: Literal["healthy", "unhealthy", "unknown"]
    healthSince: Time | None
    certificateExpiresAt: Time | None
    openFindings: OpenFindings


class Repository(msgspec.Struct):
    url: str
    branch: str


class AppRecord(msgspec.Struct):
    """As an operator sees it: without its secret."""

    id: str
    name: str
    account: str
    auth: dict[str, Any]
    url: str
    customDomain: str | None
    customDomainVerified: bool
    repository: Repository | None
    build: Build | None
    createdAt: Time


class Receiver(msgspec.Struct):
    url: str
    createdAt: Time


class SetReceiver(Receiver):
    secret: str | msgspec.UnsetType = msgspec.UNSET  # of another URL than before; it shows only here


class Id(msgspec.Struct):
    id: str


class Delivery(msgspec.Struct):
    id: str
    type: str
    app: str | None
    at: Time
    durationMs: int
    outcome: Literal["delivered", "failed", "dropped"]
    status: int | msgspec.UnsetType = msgspec.UNSET  # the receiver's
    error: str | msgspec.UnsetType = msgspec.UNSET


class Hook(msgspec.Struct):
    id: str
    name: str
    app: str
    createdAt: Time


class CreatedHook(Hook):
    url: str  # the secret; it shows only here


class ListedHook(Hook):
    lastUsedAt: Time | None


class Queued(msgspec.Struct):
    deployId: str


class Triggered(Queued):
    app: str


class Deploy(msgspec.Struct):
    id: str
    app: str
    kind: Kind
    state: State
    trigger: Trigger
    createdAt: Time
    commit: str | msgspec.UnsetType = msgspec.UNSET
    finishedAt: Time | msgspec.UnsetType = msgspec.UNSET
    durationMs: int | msgspec.UnsetType = msgspec.UNSET
    url: str | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType = msgspec.UNSET


class DeployWithLog(Deploy, kw_only=True):
    log: str


class QueuedDeploy(Deploy, kw_only=True):
    """What an outside engine needs to build it."""

    appId: str
    branch: str | None
    source: str | None  # where the tar.gz is to be had; null: the repository is built
    repository: Repository | msgspec.UnsetType | None = msgspec.UNSET
    build: Build | msgspec.UnsetType | None = msgspec.UNSET


class Status(msgspec.Struct):
    status: str


class Model(msgspec.Struct):
    """In the OpenAI format."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]
