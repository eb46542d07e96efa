"""Waits for the pod of a release. Says why there is none, or why its app does not answer."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import structlog

from gateway.deploys.pod_log import APP_CONTAINER
from gateway.deploys.states import DeployError
from workers.engine.driver import Target
from workers.engine.health import Listening, request_health, until_up
from workers.hosting.watchdog import LIMITS
from workers.kubernetes.cluster import Cluster, explain_refusal
from workers.kubernetes.objects import object_name
from workers.kubernetes.pod_relay import ask_relay
from workers.kubernetes.pod_status import (
    address_of,
    explain_waiting,
    find_condition,
    find_end,
    has_ended,
    is_ready,
    serves,
    statuses_of,
)

logger = structlog.get_logger()

PLACE_SECONDS = 120.0  # in which a pod must find a node, get its image and its release
POLL_SECONDS = 0.2  # between requests to an app that starts


class Startup:
    """`domain`: of the apps, without a port."""

    def __init__(
        self, cluster: Cluster, domain: str, place_seconds: float, start_seconds: float, poll_seconds: float
    ) -> None:
        self._cluster, self._domain = cluster, domain
        self._place_seconds, self._start_seconds, self._poll_seconds = place_seconds, start_seconds, poll_seconds

    async def until_up(self, target: Target) -> None:
        """Waits until the release is up, and Services lead to its pod. Raises DeployError."""
        pod = await self.until_pod(target.deploy, self._place_seconds + self._start_seconds)
        if statuses_of(pod, APP_CONTAINER):
            await self._until_command_is_up(target, pod)
        else:
            await self.request_health(target, pod)
        # An app may answer before the cluster counts its pod. The Service would lead nowhere meanwhile.
        await self.until_pod(target.deploy, is_fit=is_ready)

    async def _until_command_is_up(self, target: Target, pod: Any) -> None:
        async def find_listening() -> Listening | None:
            with contextlib.suppress(OSError, ValueError):
                return (await ask_relay(pod.status.podIP)).listening
            return None

        def require_running() -> None:
            now = self._cluster.present.get(("Pod", pod.metadata.name))
            if now is not None and (outcome := find_end(now)):
                raise DeployError(outcome.describe("the start command", LIMITS))

        await until_up(
            target.release,
            lambda: self.request_health(target, pod),
            find_listening,
            require_running,
            seconds=self._start_seconds,
            poll_seconds=self._poll_seconds,
        )

    async def until_pod(self, deploy: str, seconds: float | None = None, is_fit: Callable[[Any], bool] = serves) -> Any:
        """Waits until a pod of the release is fit, and returns it. Raises DeployError."""
        seconds = self._start_seconds if seconds is None else seconds
        ends, why = time.monotonic() + seconds, "it has no pod"
        while time.monotonic() < ends:
            self._check_deployment(deploy)
            pods = [pod for pod in self._cluster.select("Pod", deploy=deploy) if not has_ended(pod)]
            for pod in sorted(pods, key=lambda pod: str(pod.metadata.creationTimestamp), reverse=True):
                if outcome := find_end(pod):
                    raise DeployError(outcome.describe("the start command", LIMITS))
                if is_fit(pod):
                    return pod
                why, is_final = explain_waiting(pod)
                if is_final:
                    reason = f"the cluster can't start the app: {why}; the operator must help"
                    raise DeployError(reason, service_fault=True)
            await self._cluster.next_change(1.0)
        reason = f"the cluster did not start the app within {seconds:.0f} seconds: {why}"
        raise DeployError(reason, service_fault=True)

    def _check_deployment(self, deploy: str) -> None:
        """Raises DeployError if no pod can be made, such as for a full quota."""
        deployment = self._cluster.present.get(("Deployment", object_name(deploy)))
        failure = find_condition(deployment, "ReplicaFailure", "True") if deployment is not None else None
        if failure is not None:
            logger.error("kubernetes.no_pod", deploy=deploy, reason=failure.message)
            raise DeployError(explain_refusal(failure.message or "", "start"), service_fault=True)

    async def request_health(self, target: Target, pod: Any) -> None:
        await request_health(target.release, f"http://{address_of(pod)}", target.host(self._domain))
