"""What the worker sends the pods that wait for their releases, and reports of all pods."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from lightkube.resources.core_v1 import Pod
from msgspec.structs import replace

from gateway.cancellation import run_in_background
from gateway.deploys.pods import NodeLoad, PodReport, PodStates, WaitingPod, read_pod_report
from gateway.deploys.release import ReleaseArchive
from gateway.keys import PODS_KEY
from gateway.redis.client import Store
from gateway.storage import FolderStorage
from gateway.storage import Object as StoredObject
from tests.fakes.cluster import ADDRESSES
from tests.support.pods import RELEASE, make_pod, statuses
from tests.support.polling import wait_until
from workers.hosting.archives import archive_key
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.objects import Object
from workers.kubernetes.pod import RECEIVE_PORT
from workers.kubernetes.pod_report import describe_pods, keep_reporting, read_pod
from workers.kubernetes.pod_status import explain_waiting, may_run
from workers.kubernetes.pods import Pods

PREVIOUS, NEXT = "dep_1", "dep_2"


class Receiver:
    """A pod that waits for its release, and takes what is sent."""

    def __init__(self) -> None:
        self.address, self.paths = next(ADDRESSES), list[str]()
        application = web.Application()
        application.router.add_put("/{path:.*}", self._take)
        self._runner = web.AppRunner(application)

    async def _take(self, request: web.Request) -> web.Response:
        await request.read()
        self.paths.append(request.path)
        return web.Response(status=204)

    async def listen(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, RECEIVE_PORT).start()

    async def aclose(self) -> None:
        await self._runner.cleanup()


async def test_a_pod_that_does_not_listen_yet_gets_the_release_before_as_well(tmp_path: Path) -> None:
    """It begins to listen after the first attempt to send something."""
    receiver, opened = Receiver(), list[str]()

    class Storage(FolderStorage):
        async def open(self, key: str) -> StoredObject | None:
            opened.append(key)
            if len(opened) == 2:
                await receiver.listen()
            return await super().open(key)

    storage, archive = Storage(tmp_path), ReleaseArchive("d" * 64, 3)
    for deploy in (PREVIOUS, NEXT):
        await storage.put(archive_key(RELEASE.app, deploy), b"abc")
    release = replace(RELEASE, deploy=NEXT, archive=archive)
    [receiving] = statuses(release={"running": {"startedAt": "2026-11-28T09:00:05Z"}})
    status = {"phase": "Pending", "podIP": receiver.address, "initContainerStatuses": [receiving]}
    pod = make_pod(status, release=release, uid="u")
    cluster = cast("Cluster", SimpleNamespace(present={("Pod", "p"): pod}, followers=defaultdict(list)))

    async def report(*_: Any) -> None: ...

    pods = Pods(cluster, storage, report, lambda _: "token", lambda _: PREVIOUS, lambda *_: archive)
    pods.follow(pod)
    try:
        wanted = [f"/previous/{PREVIOUS}", "/release"]
        await wait_until(lambda: receiver.paths, holds=lambda paths: "/release" in paths)
        assert receiver.paths == wanted
    finally:
        await pods.aclose()
        await receiver.aclose()


MIB = 1 << 20
NO_ROOM = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 Insufficient"
    " memory."
)
NO_VICTIM = " preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod."
STARTED = {"running": {"startedAt": "2026-11-28T09:00:05Z"}}
WAITS = {"waiting": {"reason": "PodInitializing"}}


def condition(kind: str, status: str, since: str = "2026-11-28T09:00:02Z", **more: str) -> Object:
    return {"type": kind, "status": status, "lastTransitionTime": since, **more}


def ended(code: int, reason: str) -> Object:
    return {"terminated": {"exitCode": code, "reason": reason}}


def waiting(reason: str) -> Object:
    return {"waiting": {"reason": reason}}


def failed_starts(number: int, state: Object | None = None) -> list[Object]:
    [release] = statuses(release=state or waiting("CrashLoopBackOff"))
    return [{**release, "restartCount": number, "lastState": ended(3, "Error")}]


UNSCHEDULED: Object = {
    "phase": "Pending",
    "conditions": [condition("PodScheduled", "False", reason="Unschedulable", message=NO_ROOM + NO_VICTIM)],
}
SCHEDULED = [condition("PodScheduled", "True")]
RUNNING: Object = {
    "phase": "Running",
    "conditions": [*SCHEDULED, condition("Ready", "True")],
    "initContainerStatuses": statuses(release=ended(0, "Completed")),
    "containerStatuses": statuses(web=STARTED, app=STARTED),
}


def pending(release: Object, web: Object = WAITS, app: Object = WAITS) -> Object:
    return {
        "phase": "Pending",
        "conditions": [*SCHEDULED, condition("Ready", "False")],
        "initContainerStatuses": statuses(release=release),
        "containerStatuses": statuses(web=web, app=app),
    }


def report_of(pods: Iterable[Any]) -> PodReport:
    return describe_pods([read_pod(pod) for pod in pods])


RECEIVED = ended(0, "Completed")
STATES = [
    ("running", "", RUNNING),
    ("starting", "", {"phase": "Pending"}),
    ("starting", "", pending(RECEIVED, STARTED, waiting("ContainerCreating"))),
    ("waitingForRelease", "", pending(STARTED)),
    ("waitingForRoom", "", UNSCHEDULED),
    ("failing", "ImagePullBackOff", pending(waiting("ImagePullBackOff"))),
    ("failing", "CrashLoopBackOff", pending(RECEIVED, STARTED, waiting("CrashLoopBackOff"))),
    ("failing", "OOMKilled", pending(RECEIVED, STARTED, ended(137, "OOMKilled"))),
    ("ended", "", {"phase": "Failed", "reason": "Evicted"}),
]


@pytest.mark.parametrize(("state", "failure", "status"), STATES)
def test_a_pod_counts_in_its_state(state: str, failure: str, status: Object) -> None:
    report = report_of([make_pod(status)])
    assert report.states == PodStates(**{state: 1})
    assert report.failures == ({failure: 1} if failure else {})
    assert report.total == 1


def test_a_pod_that_is_deleted_stops_and_keeps_its_memory_meanwhile() -> None:
    report = report_of([make_pod(RUNNING, deletionTimestamp="2026-11-28T10:00:00Z")])
    assert report.states == PodStates(stopping=1)
    assert [node.pods for node in report.nodes] == [1]


def test_a_node_has_the_memory_of_its_pods() -> None:
    static = replace(RELEASE, runs=False)
    evicted: Object = {"phase": "Failed", "reason": "Evicted"}
    pods = [
        make_pod(RUNNING, "node-2"),
        make_pod(pending(STARTED), "node-2", static),
        make_pod(RUNNING, "node-1"),
        make_pod(evicted, "node-1"),
        make_pod(UNSCHEDULED, ""),
    ]
    assert report_of(pods).nodes == [
        NodeLoad("node-1", 1, 128 * MIB, 1024 * MIB),
        NodeLoad("node-2", 2, (128 + 64) * MIB, (1024 + 256) * MIB),
    ]


def test_memory_counts_as_the_scheduler_counts_it() -> None:
    """https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers"""
    pod = make_pod(RUNNING)
    pod.spec.initContainers[0].resources.requests["memory"] = "1Gi"
    pod.spec.initContainers[0].resources.limits = None
    pod.spec.overhead = {"memory": "160e6"}
    assert report_of([pod]).nodes == [NodeLoad("node-1", 1, 1024 * MIB + 160_000_000, 1024 * MIB + 160_000_000)]


def test_what_waits_for_room_says_since_when_and_why() -> None:
    """A long reason is cut between words."""
    [found] = report_of([make_pod(UNSCHEDULED, "")]).waiting
    assert found == WaitingPod(RELEASE.app, RELEASE.deploy, "2026-11-28T09:00:02.000Z", NO_ROOM)
    message = "0/900 nodes are available: " + "1 Insufficient memory, " * 50
    status = {"phase": "Pending", "conditions": [condition("PodScheduled", "False", message=message)]}
    [found] = report_of([make_pod(status, "")]).waiting
    assert 150 < len(found.reason) <= 200
    assert found.reason.endswith((" memory, …", " 1 …", " Insufficient …"))


def test_the_fifty_that_have_waited_longest_are_listed() -> None:
    def wait(number: int) -> Any:
        since = f"2026-11-28T09:{number:02}:00Z"
        status = {"phase": "Pending", "conditions": [condition("PodScheduled", "False", since)]}
        return make_pod(status, "", replace(RELEASE, deploy=f"dep_{number}"))

    report = report_of([wait(number) for number in reversed(range(60))])
    assert [each.deploy for each in report.waiting] == [f"dep_{number}" for number in range(50)]
    assert report.states.waitingForRoom == 60


def test_a_pod_without_labels_and_status_does_not_hide_the_others() -> None:
    bare = Pod.from_dict({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "one"}], "nodeName": "node-1"}})
    report = report_of([bare, make_pod(RUNNING)])
    assert report.states == PodStates(running=1, starting=1)
    assert report.nodes == [NodeLoad("node-1", 2, 128 * MIB, 1024 * MIB)]


async def test_the_report_follows_the_cluster_and_expires(store: Store) -> None:
    pods, changes = [make_pod(RUNNING)], Counter[str]()
    unconnected = SimpleNamespace(select={"Pod": pods}.__getitem__, changes=changes)
    assert await read_pod_report(store) == PodReport()

    async def states() -> PodStates:
        return (await read_pod_report(store)).states

    async def reports(expected: PodStates) -> bool:
        return await states() == expected

    async with run_in_background(keep_reporting(store, cast("Cluster", unconnected), 0.05)):
        await wait_until(lambda: reports(PodStates(running=1)))
        pods.append(make_pod(UNSCHEDULED, ""))
        changes["Pod"] += 1
        await wait_until(lambda: reports(PodStates(running=1, waitingForRoom=1)))
    assert 50 < await store.client.ttl(PODS_KEY) <= 60


@pytest.mark.parametrize(
    ("status", "why", "is_final"),
    [
        ({"initContainerStatuses": statuses(release=waiting("ErrImagePull"))}, "its image", True),
        ({"conditions": [condition("PodScheduled", "False", message=NO_ROOM)]}, "no node has room", False),
        ({"initContainerStatuses": statuses(release=WAITS)}, "its node", False),
        ({"initContainerStatuses": statuses(release=STARTED), "podIP": "10.0.0.1"}, "it waits for its release", False),
        ({"containerStatuses": statuses(web=STARTED)}, "it is starting", False),
        ({"initContainerStatuses": failed_starts(3)}, "the container that takes its release ends with status 3", True),
        ({"initContainerStatuses": failed_starts(3, STARTED), "podIP": "10.0.0.1"}, "it waits for its release", False),
    ],
)
def test_why_a_pod_is_not_ready(status: Object, why: str, is_final: bool) -> None:
    said = explain_waiting(make_pod(status))
    assert said[0].startswith(why)
    assert said[1] is is_final


@pytest.mark.parametrize(
    ("status", "is_deleted", "runs"),
    [
        ({"containerStatuses": statuses(app=STARTED)}, True, True),
        ({"containerStatuses": statuses(app=ended(0, "Completed"))}, False, True),  # it is started again
        ({"containerStatuses": statuses(app=ended(0, "Completed"), web=STARTED)}, True, False),
        ({}, True, True),
        ({"phase": "Failed"}, False, False),
    ],
)
def test_whether_a_start_command_may_run(status: Object, is_deleted: bool, runs: bool) -> None:
    deleted = {"deletionTimestamp": "2026-11-28T09:01:00Z"} if is_deleted else {}
    assert may_run(make_pod(status, **deleted)) is runs
