"""What the worker sends the pods that wait for their releases."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web
from msgspec.structs import replace

from gateway.deploys.release import ReleaseArchive
from gateway.storage import FolderStorage, Object
from tests.fakes.cluster import ADDRESSES
from tests.support.pods import RELEASE, make_pod, statuses
from tests.support.polling import wait_until
from workers.hosting.archives import archive_key
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.pod import RECEIVE_PORT
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
        async def open(self, key: str) -> Object | None:
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
