"""Pods of releases, as the API of a cluster describes them."""

from typing import Any

from lightkube.resources.core_v1 import Pod

from gateway.deploys.release import ReleaseArchive
from gateway.settings import Settings
from workers.kubernetes.objects import Object, describe_deployment
from workers.kubernetes.pod import PodRelease

RELEASE = PodRelease(
    "acc_019b3c5a7d40123456789",
    "app-019b3c5a7d4abcdef0123",
    "live",
    "dep_019b3c5a7d4abcdef4567",
    ReleaseArchive("d" * 64, 1_000),
    "https://notes.example.com",
    runs=True,
)


def statuses(**states: Object) -> list[Object]:
    common = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
    return [{"name": name, "state": state, **common} for name, state in states.items()]


def make_pod(status: Object, node: str = "node-1", release: PodRelease = RELEASE, **metadata: str) -> Any:
    """Makes a pod of a release, as the API describes it."""
    template = describe_deployment(release, Settings(apps_engine="kubernetes"))["spec"]["template"]
    head = {"name": "p", "creationTimestamp": "2026-11-28T09:00:00Z", **template["metadata"], **metadata}
    spec = template["spec"] | ({"nodeName": node} if node else {})
    return Pod.from_dict({"metadata": head, "spec": spec, "status": status})
