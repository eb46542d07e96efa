"""Follows the pods of apps: sends each new one the release for which it waits, and reports crashes."""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import datetime
from typing import Any, Literal

import aiohttp
import msgspec
import structlog

from gateway.cancellation import RunningTasks, end_if_canceled
from gateway.deploys.pod_log import APP_CONTAINER
from gateway.deploys.release import ReleaseArchive
from gateway.errors import StorageUnavailable
from gateway.storage import Storage
from workers.hosting.archives import archive_key
from workers.hosting.driver import OUTPUT_LINES
from workers.kubernetes.cluster import Cluster
from workers.kubernetes.pod import RECEIVE_PORT, PodRelease
from workers.kubernetes.pod_status import (
    exceeded_limit,
    find_termination,
    host_of,
    is_over,
    is_waiting_for_release,
    read_release,
    statuses_of,
)
from workers.sandbox.sandbox import MIB

logger = structlog.get_logger()

SENDS = 8  # releases at once
SEND_SECONDS = 300.0  # in which a pod must have got its release
SEND_PAUSE_SECONDS = 1.0  # between attempts
PREVIOUS_ARCHIVE_BYTES = 64 * MIB  # of the previous release's archive: a larger one would hold up the deploy
# How the cluster ends pods and containers itself: the app has not crashed.
POD_REASONS = (
    "Evicted",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
    "NodeLost",
    "Preempting",
    "UnexpectedAdmissionError",
)
CONTAINER_REASONS = ("ContainerStatusUnknown", "Unknown")  # its node was restarted

# App id, reason, exit code, the last lines of its output, the id of the event.
ReportCrash = Callable[[str, Literal["exit", "oom"], int | None, list[str], str], Awaitable[None]]


class PodCrash(msgspec.Struct, frozen=True):
    """How the start command of a pod ended by itself."""

    id: str  # of the event
    reason: Literal["exit", "oom"]
    code: int | None
    lines: list[str]  # the last ones of its output


def find_crash(pod: Any) -> PodCrash | None:
    """Returns how the start command of the pod ended last, unless the cluster ended it for reasons of its own."""
    if exceeded_limit(pod):
        times = [each.lastTransitionTime for each in pod.status.conditions or [] if each.lastTransitionTime]
        at = max(times, default=pod.status.startTime or pod.metadata.creationTimestamp)
        return PodCrash(_make_id(pod, "evicted", at), "exit", None, [pod.status.message.strip()])
    for status in statuses_of(pod, APP_CONTAINER) if pod.status and pod.status.reason not in POD_REASONS else ():
        ended = find_termination(status)
        if ended and ended.finishedAt and ended.reason not in CONTAINER_REASONS:
            reason: Literal["exit", "oom"] = "oom" if ended.reason == "OOMKilled" else "exit"
            event_id = _make_id(pod, ended.containerID, ended.finishedAt)
            return PodCrash(event_id, reason, ended.exitCode, (ended.message or "").splitlines())
    return None


def _make_id(pod: Any, what: str, at: datetime) -> str:
    """Returns the same id for the same crash, however often it is seen."""
    digest = hashlib.sha256(f"{pod.metadata.uid} {what}".encode()).hexdigest()
    return f"evt_{int(at.timestamp() * 1000):011x}{digest[:10]}"


class Pods:
    def __init__(
        self,
        cluster: Cluster,
        storage: Storage,
        report_crash: ReportCrash,
        find_token: Callable[[str], str],
        find_served: Callable[[PodRelease], str],
        find_archive: Callable[[PodRelease, str], ReleaseArchive | None],
    ) -> None:
        """`find_token` returns the token of a deploy's pods, `find_served` the deploy whose release visitors get at the
        address, and `find_archive` the archive of such a deploy.
        """
        self._cluster, self._storage, self._report_crash = cluster, storage, report_crash
        self._find_token, self._find_served, self._find_archive = find_token, find_served, find_archive
        self._sends = asyncio.Semaphore(SENDS)
        self._sending = RunningTasks()  # by uid of the pod, or id of the crash
        self._reported: dict[str, str] = {}  # the event of the latest crash, by app
        cluster.followers["Pod"].append(self.follow)

    async def aclose(self) -> None:
        await self._sending.cancel()

    def follow(self, pod: Any) -> None:
        """Sends the pod its release if it waits for it, and reports a crash."""
        release = read_release(pod)
        if release is None or pod.metadata.deletionTimestamp:
            return
        if is_waiting_for_release(pod):
            self._sending.start(self._send_release(pod, release), pod.metadata.uid)
        if release.address != "live" or self._find_served(release) != release.deploy:
            return
        crash = find_crash(pod)
        if crash is not None and crash.id != self._reported.get(release.app):
            self._reported[release.app] = crash.id
            logger.warning("app.ended", app=release.app, deploy=release.deploy, code=crash.code, why=crash.reason)
            self._sending.start(self._report(pod, release, crash), crash.id)

    async def _report(self, pod: Any, release: PodRelease, crash: PodCrash) -> None:
        lines = crash.lines
        if is_over(pod):  # no status has the last lines of its containers
            lines = [*await self._cluster.read_log(pod.metadata.name, APP_CONTAINER, OUTPUT_LINES), *lines]
        await self._report_crash(release.app, crash.reason, crash.code, lines, crash.id)

    async def _send_release(self, pod: Any, release: PodRelease) -> None:
        """Sends the release to the pod, until the pod has it or is gone."""
        name, uid = pod.metadata.name, pod.metadata.uid
        began = time.monotonic()
        while (now := self._cluster.present.get(("Pod", name))) is not None and now.metadata.uid == uid:
            if not is_waiting_for_release(now):
                return
            try:
                async with self._sends:
                    await self._send_previous(pod, release)
                    await self._try_to_send(pod, "/release", release, release.deploy, release.archive)
            except (aiohttp.ClientError, OSError, TimeoutError, StorageUnavailable) as error:
                logger.info("sites.not_sent", deploy=release.deploy, reason=str(error) or type(error).__name__)
            else:
                logger.info("sites.sent", deploy=release.deploy, seconds=time.monotonic() - began)
                return
            end_if_canceled()
            await asyncio.sleep(SEND_PAUSE_SECONDS)

    async def _send_previous(self, pod: Any, release: PodRelease) -> None:
        """Sends a pod whose release is new the one that visitors have now, if it is small.

        Raises ClientConnectorError while the pod does not listen.
        """
        served = self._find_served(release)
        previous = self._find_archive(release, served) if served != release.deploy else None
        if previous is not None and previous.size <= PREVIOUS_ARCHIVE_BYTES:
            try:
                await self._try_to_send(pod, f"/previous/{served}?digest={previous.digest}", release, served, previous)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ClientError, OSError, TimeoutError, StorageUnavailable) as error:
                # Only pages that are open now need it.
                logger.info("sites.previous_not_sent", deploy=served, reason=str(error) or type(error).__name__)

    async def _try_to_send(
        self, pod: Any, path: str, release: PodRelease, deploy: str, expected: ReleaseArchive
    ) -> None:
        """Raises OSError, or an error of the client or the storage, unless the pod has taken the archive."""
        archive = await self._storage.open(archive_key(release.app, deploy))
        if archive is None:
            raise StorageUnavailable("the archive is gone")
        headers = {"Authorization": f"Bearer {self._find_token(release.deploy)}", "Content-Length": str(expected.size)}
        timeout = aiohttp.ClientTimeout(total=SEND_SECONDS, connect=5)
        url = f"http://{host_of(pod)}:{RECEIVE_PORT}{path}"
        async with (
            aclosing(archive.chunks) as chunks,
            aiohttp.ClientSession(timeout=timeout) as client,
            client.put(url, data=chunks, headers=headers) as answer,
        ):
            if answer.status != 204:
                raise OSError(f"the pod answered {answer.status}")
