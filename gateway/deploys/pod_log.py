"""Reads the output of apps' start commands on Kubernetes from the cluster, as `runtime_log.py` does from disk."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from gateway.accounts.records import App
from gateway.cancellation import end_if_canceled, run_in_background
from gateway.deploys.runtime_log import POLL_SECONDS, RuntimeLog
from gateway.deploys.serving import Records
from gateway.ids import ALWAYS, TimeSpan, read_time

APP_CONTAINER, DEPLOY_LABEL = "app", "capsule/deploy"  # as `workers/kubernetes/objects.py` names them
RETRY_SECONDS = 1.0  # after a log has ended: its container ends, or the API server is away
WAITING_LINES = 1_000  # that were read and not yet fetched
UNREACHABLE_SECONDS = 5.0
CLOCK_SECONDS = 60.0  # that the clocks of a node and of this machine may differ


def _choose(lines: int | None, span: TimeSpan) -> dict[str, int | None]:
    """Returns the parameters of a request for these lines. It may get others too, because clocks differ."""
    if span.since == -math.inf:
        return {"tail_lines": lines if span == ALWAYS else None}
    return {"since": max(1, math.ceil(time.time() - span.since + CLOCK_SECONDS))}


class PodLog(RuntimeLog):
    """The logs in one namespace. Without the API server, they are empty."""

    def __init__(
        self,
        namespace: str,
        records: Records,
        *,
        poll_seconds: float = POLL_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        super().__init__("", poll_seconds=poll_seconds)
        self._retry_seconds = retry_seconds
        self._namespace, self._records = namespace, records
        self._present: Any = None

    async def has_start_command(self, app: App, live: str | None) -> bool:
        """Returns whether the app has a start command, or runs one that its build recognized, even if it sleeps.

        Raises BackboneUnavailable.
        """
        if app.build is not None:
            return app.build.start is not None
        records = await self._records.read(app.account, app.id)
        releases = records["live"][1].releases if "live" in records else {}
        return live in releases and releases[live].runs

    async def tail(self, deploy_id: str, lines: int, span: TimeSpan = ALWAYS) -> list[str]:
        found = deque[str](maxlen=lines)
        if (pod := await self._find_pod(deploy_id)) is not None:
            async for at, line in self._read_pod(pod, **_choose(lines, span)):
                if span == ALWAYS or span.contains(read_time(at)):
                    found.append(line)
        return [*found]

    async def follow(
        self,
        find_deploy: Callable[[], Awaitable[str | None]],
        lines: int,
        until: Callable[[], bool],
        span: TimeSpan = ALWAYS,
    ) -> AsyncGenerator[list[str]]:
        wanted: int | None = lines
        deploy_id = await find_deploy()
        while not until():
            found: asyncio.Queue[str] = asyncio.Queue(WAITING_LINES)
            checked_at = asyncio.get_running_loop().time()
            async with run_in_background(self._collect(deploy_id, wanted, span, found)):
                while not until():
                    yield [found.get_nowait() for _ in range(found.qsize())]
                    await asyncio.sleep(self._poll_seconds)
                    end_if_canceled()
                    if asyncio.get_running_loop().time() - checked_at > self._deploy_seconds:
                        checked_at, now = asyncio.get_running_loop().time(), await find_deploy()
                        if now not in (None, deploy_id):
                            deploy_id, wanted, span = now, None, ALWAYS  # all output of the new deploy follows
                            break
            if not until():
                yield [found.get_nowait() for _ in range(found.qsize())]

    async def _collect(
        self, deploy_id: str | None, lines: int | None, span: TimeSpan, found: asyncio.Queue[str]
    ) -> None:
        """Collects the last lines of the span, and new ones as they are written, of one container after the other."""
        which = _choose(lines, span)
        latest, same = "", 0  # the time of the newest line, and how many lines have it
        while deploy_id is not None:
            if (pod := await self._find_pod(deploy_id)) is not None:
                former, left = latest, same  # what was read before the connection was lost comes again
                async for at, line in self._read_pod(pod, **which, follow=True):
                    if at < former or (span != ALWAYS and not span.contains(read_time(at))):
                        continue
                    if at == former and left:
                        left -= 1
                        continue
                    latest, same = at, same + 1 if at == latest else 1
                    await found.put(line)
                which = _choose(None, TimeSpan(read_time(latest)) if latest else ALWAYS)
            end_if_canceled()
            await asyncio.sleep(self._retry_seconds)

    async def _find_pod(self, deploy_id: str) -> str | None:
        """Returns the name of the newest pod that runs the start command of this deploy."""
        from httpx2 import HTTPError
        from lightkube.core.exceptions import ConfigError
        from lightkube.resources.core_v1 import Pod

        found = []
        with suppress(HTTPError, TimeoutError, ConfigError):
            async with asyncio.timeout(UNREACHABLE_SECONDS):
                listed = self._client.list(Pod, namespace=self._namespace, labels={DEPLOY_LABEL: deploy_id})
                found = [pod async for pod in listed if any(each.name == APP_CONTAINER for each in pod.spec.containers)]
        return max(found, key=lambda pod: pod.metadata.creationTimestamp).metadata.name if found else None

    async def _read_pod(self, pod: str, **which: Any) -> AsyncIterator[tuple[str, str]]:
        """Yields the lines of a log and their times. Ends early if the API server does not answer."""
        from httpx2 import HTTPError

        with suppress(HTTPError):
            log = self._client.log(
                pod, namespace=self._namespace, container=APP_CONTAINER, timestamps=True, newlines=False, **which
            )
            async for text in log:
                at, _, line = text.partition(" ")
                yield at, line

    @property
    def _client(self) -> Any:
        if self._present is None:
            from lightkube import AsyncClient  # imported here, because only this engine needs it

            self._present = AsyncClient(namespace=self._namespace)
        return self._present
