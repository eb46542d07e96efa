"""The pods of apps on Kubernetes, as the active worker `sites` reports them for the operators' page."""

import msgspec

from gateway.ids import Time
from gateway.keys import PODS_KEY
from gateway.redis.client import Store

LIFETIME_SECONDS = 60  # of a report


class PodStates(msgspec.Struct, frozen=True):
    """The number of pods in each state."""

    running: int = 0
    starting: int = 0
    waitingForRelease: int = 0
    waitingForRoom: int = 0
    failing: int = 0
    stopping: int = 0
    ended: int = 0  # evicted, or shut down with their node; they use nothing


class NodeLoad(msgspec.Struct, frozen=True):
    """What the pods of apps take up on a node, in bytes."""

    node: str
    pods: int
    memoryRequested: int
    memoryLimit: int


class WaitingPod(msgspec.Struct, frozen=True):
    """A pod for which no node has room."""

    app: str  # id
    deploy: str  # id
    since: Time
    reason: str  # the scheduler's message, shortened


class PodReport(msgspec.Struct, frozen=True):
    at: Time | None = None  # null if no worker has reported for a minute
    total: int = 0
    states: PodStates = PodStates()
    failures: dict[str, int] = {}  # why pods fail, such as CrashLoopBackOff → number of pods
    nodes: list[NodeLoad] = []  # those with pods of apps, by name
    waiting: list[WaitingPod] = []  # the 50 that have waited longest


async def write_pod_report(store: Store, report: PodReport) -> None:
    """Raises BackboneUnavailable."""
    await store.client.set(PODS_KEY, msgspec.json.encode(report), ex=LIFETIME_SECONDS)


async def read_pod_report(store: Store) -> PodReport:
    """Raises BackboneUnavailable."""
    text = await store.client.get(PODS_KEY)
    return msgspec.json.decode(text, type=PodReport) if text else PodReport()
