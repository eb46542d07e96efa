"""Reports what runs in the cluster and what waits for room, for the operators' page (`gateway/deploys/pods.py`).

Everything comes from the pods that the worker watches anyway, so it needs no right to read nodes. While the API server
is away, the report repeats what was last known.
"""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import msgspec

from gateway.deploys.pod_log import DEPLOY_LABEL
from gateway.deploys.pods import NodeLoad, PodReport, PodStates, WaitingPod, write_pod_report
from gateway.ids import now_iso
from gateway.loops import every
from gateway.redis.client import Store
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.objects import APP_LABEL
from workers.kubernetes.pod_status import find_condition, is_over, list_init_statuses, list_statuses, read_bytes

REPORT_SECONDS = 5.0  # between two reports
MAX_WAITING = 50  # pods in a report
REASON_LENGTH = 200
NORMAL_WAITS = ("ContainerCreating", "PodInitializing")  # for any other reason, a container cannot start


class PodFacts(msgspec.Struct, frozen=True):
    """What the report says of a pod."""

    pod: Any  # which nothing else is identical to, as long as this refers to it
    state: str  # the name of a field of `PodStates`
    failure: str  # why it is failing, or ''
    node: str  # on which it takes up memory, or ''
    requested: int  # bytes of memory
    limit: int
    waiting: WaitingPod | None


async def keep_reporting(store: Store, cluster: Cluster, seconds: float = REPORT_SECONDS) -> NoReturn:
    """Reports every so many seconds until canceled. Reads only the pods that have changed."""
    known: dict[int, PodFacts] = {}  # by identity, because a change makes another object of a pod
    described, changes = PodReport(), -1

    async def report() -> None:
        nonlocal known, described, changes
        if changes != cluster.changes["Pod"]:
            changes = cluster.changes["Pod"]
            known = {id(pod): known.get(id(pod)) or read_pod(pod) for pod in cluster.select("Pod")}
            described = describe_pods(known.values())
        await write_pod_report(store, msgspec.structs.replace(described, at=now_iso()))

    await every(seconds, report, "sites.pods_not_reported")


def describe_pods(pods: Collection[PodFacts]) -> PodReport:
    """Returns the report of these pods."""
    nodes = defaultdict[str, list[PodFacts]](list)
    for pod in pods:
        if pod.node:
            nodes[pod.node].append(pod)
    waiting = sorted(filter(None, (pod.waiting for pod in pods)), key=lambda each: each.since)
    return PodReport(
        at=now_iso(),
        total=len(pods),
        states=PodStates(**Counter(pod.state for pod in pods)),
        failures=dict(Counter(pod.failure for pod in pods if pod.state == "failing")),
        nodes=[
            NodeLoad(node, len(load), sum(pod.requested for pod in load), sum(pod.limit for pod in load))
            for node, load in sorted(nodes.items())
        ],
        waiting=waiting[:MAX_WAITING],
    )


def read_pod(pod: Any) -> PodFacts:
    """Reads a pod as the API describes it."""
    state = _find_state(pod)
    return PodFacts(
        pod,
        state,
        failure=_find_failure(pod) if state == "failing" else "",
        node=(pod.spec.nodeName or "") if state != "ended" else "",
        requested=_sum_memory(pod, "requests"),
        limit=_sum_memory(pod, "limits"),
        waiting=_describe_waiting(pod) if state == "waitingForRoom" else None,
    )


def _find_state(pod: Any) -> str:
    """Returns the name of a field of `PodStates`."""
    if pod.metadata.deletionTimestamp:
        return "stopping"
    if is_over(pod):
        return "ended"
    if _find_failure(pod):
        return "failing"
    if find_condition(pod, "PodScheduled", "False"):
        return "waitingForRoom"
    if any(status.state and status.state.running for status in list_init_statuses(pod)):
        return "waitingForRelease"
    return "running" if find_condition(pod, "Ready", "True") else "starting"


def _find_failure(pod: Any) -> str:
    """Returns why a container cannot start, or has ended with an error; '' for neither."""
    statuses = [*list_init_statuses(pod), *list_statuses(pod)]
    for state in [status.state for status in statuses if status.state]:
        if state.waiting and state.waiting.reason and state.waiting.reason not in NORMAL_WAITS:
            return str(state.waiting.reason)
        if state.terminated and state.terminated.exitCode:
            return str(state.terminated.reason or "Error")
    return ""


def _describe_waiting(pod: Any) -> WaitingPod:
    condition: Any = find_condition(pod, "PodScheduled", "False")
    labels = pod.metadata.labels or {}
    since = condition.lastTransitionTime or pod.metadata.creationTimestamp
    # What follows says why no other pod makes room.
    message = (condition.message or "").partition(" preemption: ")[0]
    return WaitingPod(
        app=labels.get(APP_LABEL, ""),
        deploy=labels.get(DEPLOY_LABEL, ""),
        since=now_iso(since.timestamp()),
        reason=textwrap.shorten(message, REASON_LENGTH, placeholder=" …"),
    )


def _sum_memory(pod: Any, kind: str) -> int:
    """Returns bytes as the scheduler counts them: the containers run together, each init container runs alone."""
    before, containers = (_list_memory(each or [], kind) for each in (pod.spec.initContainers, pod.spec.containers))
    return max([sum(containers), *before]) + read_bytes((pod.spec.overhead or {}).get("memory", "0"))


def _list_memory(containers: Iterable[Any], kind: str) -> list[int]:
    found = [getattr(each.resources, kind, None) or {} for each in containers]
    return [read_bytes(each.get("memory", "0")) for each in found]
