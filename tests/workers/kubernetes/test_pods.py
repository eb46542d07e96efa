"""What the worker sends the pods that wait for their releases, and reports of all pods."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
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


async def test_a_pod_that_does_not_listen_yet_gets_the_release_before_as_well(tmp_path: Path) -> None:
    """It begins to listen after the first attempt to send something."""
    address = next(ADDRESSES)
    paths, opened = list[str](), list[str]()

    async def take(request: web.Request) -> web.Response:
        await request.read()
        paths.append(request.path)
        return web.Response(status=204)

    application = web.Application()
    application.router.add_put("/{path:.*}", take)
    runner = web.AppRunner(application)

    class Storage(FolderStorage):
        async def open(self, key: str) -> StoredObject | None:
            opened.append(key)
            if len(opened) == 2:
                await runner.setup()
                await web.TCPSite(runner, address, RECEIVE_PORT).start()
            return await super().open(key)

    storage, archive = Storage(tmp_path), ReleaseArchive("d" * 64, 3)
    for deploy in (PREVIOUS, NEXT):
        await storage.put(archive_key(RELEASE.app, deploy), b"abc")
    release = replace(RELEASE, deploy=NEXT, archive=archive)
    [receiving] = statuses(release={"running": {"startedAt": "2026-11-28T09:00:05Z"}})
    status = {"phase": "Pending", "podIP": address, "initContainerStatuses": [receiving]}
    pod = make_pod(status, release=release, uid="u")
    cluster = cast("Cluster", SimpleNamespace(present={("Pod", "p"): pod}, followers=defaultdict(list)))

    async def report(*_: Any) -> None: ...

    pods = Pods(cluster, storage, report, lambda _: "token", lambda _: PREVIOUS, lambda *_: archive)
    pods.follow(pod)
    try:
        await wait_until(lambda: "/release" in paths)
        assert paths == [f"/previous/{PREVIOUS}", "/release"]
    finally:
        await pods.aclose()
        await runner.cleanup()


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


def test_what_waits_for_room_says_since_when_and_why() -> None:
    [found] = report_of([make_pod(UNSCHEDULED, "")]).waiting
    assert found == WaitingPod(RELEASE.app, RELEASE.deploy, "2026-11-28T09:00:02.000Z", NO_ROOM)


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
