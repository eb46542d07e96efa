"""Reports what runs in the cluster and what waits for room, for the operators' page (`gateway/deploys/pods.py`).

Everything comes from the pods that the worker watches anyway, so it needs no right to read nodes. While the API server
is away, the report repeats what was last known.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn

from lightkube.utils.quantity import parse_quantity

from gateway.deploys.pod_log import DEPLOY_LABEL
from gateway.deploys.pods import NodeLoad, PodReport, PodStates, WaitingPod, write_pod_report
from gateway.ids import now_iso
from gateway.loops import every
from gateway.redis.client import Store
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.objects import APP_LABEL

REPORT_SECONDS = 5.0  # between two reports
MAX_WAITING = 50  # pods in a report
REASON_LENGTH = 200
NORMAL_WAITS = ("ContainerCreating", "PodInitializing")  # for any other reason, a container cannot start


async def keep_reporting(store: Store, cluster: Cluster) -> NoReturn:
    """Reports every five seconds until canceled."""

    async def report() -> None:
        await write_pod_report(store, describe_pods(cluster.select("Pod")))

    await every(REPORT_SECONDS, report, "sites.pods_not_reported")


def describe_pods(pods: Sequence[Any]) -> PodReport:
    """Returns the report of these pods, as the API describes them."""
    states, failures, nodes, waiting = Counter[str](), Counter[str](), dict[str, list[Any]](), list[WaitingPod]()
    for pod in pods:
        state = _find_state(pod)
        states[state] += 1
        if state == "failing":
            failures[_find_failure(pod)] += 1
        elif state == "waitingForRoom":
            waiting.append(_describe_waiting(pod))
        if pod.spec.nodeName and state != "ended":
            nodes.setdefault(pod.spec.nodeName, []).append(pod)
    waiting.sort(key=lambda each: each.since)
    return PodReport(
        at=now_iso(),
        total=len(pods),
        states=PodStates(**states),
        failures=dict(failures),
        nodes=[_describe_node(name, nodes[name]) for name in sorted(nodes)],
        waiting=waiting[:MAX_WAITING],
    )


def _find_state(pod: Any) -> str:
    """Returns the name of a field of `PodStates`."""
    if pod.metadata.deletionTimestamp:
        return "stopping"
    if pod.status and pod.status.phase in ("Failed", "Succeeded"):
        return "ended"
    if _find_failure(pod):
        return "failing"
    if _has(pod, "PodScheduled", "False"):
        return "waitingForRoom"
    if any(status.state and status.state.running for status in _init_statuses(pod)):
        return "waitingForRelease"
    return "running" if _has(pod, "Ready", "True") else "starting"


def _find_failure(pod: Any) -> str:
    """Returns why a container cannot start, or has ended with an error; '' for neither."""
    statuses = [*_init_statuses(pod), *((pod.status.containerStatuses or []) if pod.status else [])]
    for state in [status.state for status in statuses if status.state]:
        if state.waiting and state.waiting.reason and state.waiting.reason not in NORMAL_WAITS:
            return str(state.waiting.reason)
        if state.terminated and state.terminated.exitCode:
            return str(state.terminated.reason or "Error")
    return ""


def _describe_waiting(pod: Any) -> WaitingPod:
    condition, labels = _find_condition(pod, "PodScheduled"), pod.metadata.labels or {}
    since = condition.lastTransitionTime or pod.metadata.creationTimestamp
    # What follows says why no other pod makes room.
    message = (condition.message or "").partition(" preemption: ")[0]
    return WaitingPod(
        app=labels.get(APP_LABEL, ""),
        deploy=labels.get(DEPLOY_LABEL, ""),
        since=now_iso(since.timestamp()),
        reason=textwrap.shorten(message, REASON_LENGTH, placeholder=" …"),
    )


def _describe_node(name: str, pods: Sequence[Any]) -> NodeLoad:
    requested, limit = (sum(_sum_memory(pod, kind) for pod in pods) for kind in ("requests", "limits"))
    return NodeLoad(name, len(pods), requested, limit)


def _sum_memory(pod: Any, kind: str) -> int:
    """Returns bytes as the scheduler counts them: the containers run together, each init container runs alone."""
    before, containers = (_list_memory(each or [], kind) for each in (pod.spec.initContainers, pod.spec.containers))
    return max([sum(containers), *before]) + _parse_bytes((pod.spec.overhead or {}).get("memory", "0"))


def _list_memory(containers: Iterable[Any], kind: str) -> list[int]:
    found = [getattr(each.resources, kind, None) or {} for each in containers]
    return [_parse_bytes(each.get("memory", "0")) for each in found]


@lru_cache
def _parse_bytes(quantity: str) -> int:
    return int(parse_quantity(quantity) or 0)


def _init_statuses(pod: Any) -> list[Any]:
    return (pod.status.initContainerStatuses or []) if pod.status else []


def _find_condition(pod: Any, kind: str) -> Any:
    """Returns None if the pod has no such condition."""
    conditions = (pod.status.conditions or []) if pod.status else []
    return next((each for each in conditions if each.type == kind), None)


def _has(pod: Any, kind: str, status: Literal["True", "False"]) -> bool:
    condition = _find_condition(pod, kind)
    return condition is not None and condition.status == status
