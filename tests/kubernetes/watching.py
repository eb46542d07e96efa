"""Follows objects of the cluster through its API: the newest known state of each, also while the API server is away."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp

from tests.support.background import cancel

RETRY_SECONDS = 0.1


class Watching:
    """`objects` has the objects by kind and by namespace and name. `changed` is set at each change.

    A subclass acts on them meanwhile, with `session`.
    """

    session: aiohttp.ClientSession

    def __init__(self, server: str, token: str, paths: Mapping[str, str]) -> None:
        self.server, self.token, self.paths = server, token, paths
        self.objects: dict[str, dict[tuple[str, str], Any]] = {kind: {} for kind in paths}
        self.changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(
            self.server, headers=headers, connector=aiohttp.TCPConnector(ssl=trust), read_bufsize=1 << 22
        ) as session:
            self.session = session
            tasks = [asyncio.create_task(self._follow(session, kind)) for kind in self.paths]
            tasks.append(asyncio.create_task(self.act()))
            try:
                yield self
            finally:
                await cancel(*tasks)

    async def act(self) -> None:
        """Runs until it is canceled, or ends at once."""

    async def _follow(self, session: aiohttp.ClientSession, kind: str) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, KeyError, ValueError):
                async with session.get(self.paths[kind]) as answer:
                    listed = json.loads(await answer.read())
                self.objects[kind] = {name_of(each): each for each in listed["items"]}
                self.changed.set()
                since = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
                async with session.get(
                    self.paths[kind], params=since, timeout=aiohttp.ClientTimeout(total=None)
                ) as answer:
                    async for line in answer.content:
                        change = json.loads(line)
                        self.objects[kind].pop(name_of(change["object"]), None)
                        if change["type"] != "DELETED":
                            self.objects[kind][name_of(change["object"])] = change["object"]
                        self.changed.set()
            await asyncio.sleep(RETRY_SECONDS)


def name_of(item: Any) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
