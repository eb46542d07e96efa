"""Reads what the API says of a pod: whether it is ready, why it is not, and how its start command ended."""

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

import msgspec
from lightkube.utils.quantity import parse_quantity

from gateway.deploys.pod_log import APP_CONTAINER
from workers.kubernetes.pod import WEB_PORT, PodRelease
from workers.sandbox.keeper import STOPPED_STATUS
from workers.sandbox.sandbox import Outcome

STARTS = 3  # of the container that waits for the release, after which its pod is given up
OWN_LIMIT = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")  # in kubelets' words
NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")


def host_of(pod: Any) -> str:
    ip: str = pod.status.podIP
    return f"[{ip}]" if ":" in ip else ip


def address_of(pod: Any) -> str:
    return f"{host_of(pod)}:{WEB_PORT}"


def list_statuses(pod: Any) -> list[Any]:
    return (pod.status.containerStatuses or []) if pod.status else []


def list_init_statuses(pod: Any) -> list[Any]:
    return (pod.status.initContainerStatuses or []) if pod.status else []


def statuses_of(pod: Any, container: str) -> list[Any]:
    """Returns the status of a container; an empty list if it has none."""
    return [status for status in list_statuses(pod) if status.name == container]


def find_condition(found: Any, kind: str, status: Literal["True", "False"]) -> Any | None:
    """Returns a condition of a pod or a Deployment; None if it is unknown, or has another status."""
    conditions = (found.status.conditions or []) if found.status else []
    return next((each for each in conditions if (each.type, each.status) == (kind, status)), None)


@lru_cache
def read_bytes(quantity: str) -> int:
    return int(parse_quantity(quantity) or 0)


def find_termination(status: Any) -> Any | None:
    """Returns how a container ended: now, or before it was started again. None if it never did, or was told to."""
    ended = (status.state and status.state.terminated) or (status.lastState and status.lastState.terminated)
    return None if ended is None or ended.exitCode == STOPPED_STATUS else ended


def is_ready(pod: Any) -> bool:
    """Returns whether Services lead to the pod."""
    return serves(pod) and find_condition(pod, "Ready", "True") is not None


def serves(pod: Any, container: str = "web") -> bool:
    """Returns whether a container can be reached: by default, the pod's Caddy. Its app may not answer yet."""
    return bool(pod.status and pod.status.podIP) and any(each.ready for each in statuses_of(pod, container))


def read_release(pod: Any) -> PodRelease | None:
    """Reads what a pod serves, or the template of one."""
    with suppress(msgspec.MsgspecError, AttributeError, IndexError, TypeError):
        values = {each.name: each.value for each in pod.spec.initContainers[0].env}
        return msgspec.json.decode(values.get("CAPSULE_POD", ""), type=PodRelease)
    return None


def is_over(pod: Any) -> bool:
    """Returns whether nothing of the pod runs any more. One that was evicted may be listed for long after."""
    return bool(pod.status) and pod.status.phase in ("Failed", "Succeeded")


def has_ended(pod: Any) -> bool:
    """Returns whether the pod is over, or ends."""
    return bool(pod.metadata.deletionTimestamp) or is_over(pod)


def exceeded_limit(pod: Any) -> bool:
    """Returns whether the cluster ended the pod because it used more disk than its own limits allow."""
    evicted = pod.status and pod.status.reason == "Evicted"
    return bool(evicted and OWN_LIMIT.search(pod.status.message or ""))


def may_run(pod: Any) -> bool:
    """Returns whether the start command of a pod may run."""
    ended = [bool(status.state and status.state.terminated) for status in statuses_of(pod, APP_CONTAINER)]
    return not (is_over(pod) or (pod.metadata.deletionTimestamp and ended and all(ended)))


def is_waiting_for_release(pod: Any) -> bool:
    statuses = list_init_statuses(pod)
    return bool(statuses and statuses[0].state and statuses[0].state.running and pod.status.podIP)


def find_end(pod: Any) -> Outcome | None:
    """Returns how the start command ended, if it did."""
    for status in statuses_of(pod, APP_CONTAINER):
        if ended := find_termination(status):
            code = 128 - ended.exitCode if ended.exitCode > 128 else ended.exitCode
            return Outcome(code, "memory" if ended.reason == "OOMKilled" else "")
    return None


def explain_waiting(pod: Any) -> tuple[str, bool]:
    """Returns why a pod is not ready, and whether it will not be without help."""
    receivers = list_init_statuses(pod)
    statuses = [*receivers, *list_statuses(pod)]
    for status in statuses:
        if status.state and status.state.waiting and status.state.waiting.reason in NO_IMAGE:
            return f"its image can't be had ({status.state.waiting.reason})", True
    for status in receivers:
        ended = status.lastState and status.lastState.terminated
        if ended and status.state and status.state.waiting:
            why = f"the container that takes its release ends with status {ended.exitCode}"
            return why, status.restartCount >= STARTS
    if (unplaced := find_condition(pod, "PodScheduled", "False")) is not None:
        # The message names a PersistentVolumeClaim, or the "volume node affinity".
        lacks_volume = "olume" in (unplaced.message or "")
        return "there is no volume for its data" if lacks_volume else "no node has room for it", False
    states = [status.state for status in statuses if status.state]
    if not any(state.running or state.terminated for state in states):
        return "its node does not have its image or its volumes yet", False
    return "it waits for its release" if is_waiting_for_release(pod) else "it is starting", False
