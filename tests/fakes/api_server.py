"""The API server of a Kubernetes, over HTTP: it lists, watches, applies and deletes. A subclass has controllers."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web

from tests.support.redis_servers import free_port
from workers.kubernetes.objects import Object

BORN = "2026-11-28T09:00:00Z"


class ApiServer:
    """`conflicts`: so many writes are refused. `away`: nothing is answered, and watches end."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}  # by plural and name
        self.requests = Counter[str]()  # by their verb, without watches
        self.away, self.conflicts = False, 0
        self.oldest = 0  # version from which a watch may begin
        self._events: list[tuple[str, bytes]] = []  # plural and line of each change; the version is the position
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Yields the port."""
        runner, port = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield port
        finally:
            self.away = True
            self._wake_watchers()
            await runner.cleanup()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        self.away = True
        self._wake_watchers()
        try:
            yield
        finally:
            self.away = False

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.away:
            return _close(request)
        plural, name, part = [*request.path.partition("/namespaces/")[2].split("/")[1:], "", "", ""][:3]
        if request.method == "GET" and part == "log":
            return web.Response(text=f"the log of {name}\n")
        if request.method == "GET" and "watch" in request.query:
            return await self._watch(request, plural)
        self.requests["LIST" if request.method == "GET" else request.method] += 1
        if request.method == "GET":
            items = [each for key, each in self.objects.items() if key[0] == plural]
            listed = {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": self._version}}
            return _json(listed | {"items": items})
        if self.conflicts > 0:
            self.conflicts -= 1
            return _json({"kind": "Status", "apiVersion": "v1", "code": 409, "message": "try again"}, 409)
        if request.method == "DELETE":
            if (plural, name) not in self.objects:
                return _json({"kind": "Status", "apiVersion": "v1", "code": 404, "message": "not found"}, 404)
            await self._end(plural, name)
            return _json({"kind": "Status", "apiVersion": "v1"})
        return _json(self.put(plural, await request.json()))

    @property
    def _version(self) -> str:
        return str(len(self._events))

    async def _watch(self, request: web.BaseRequest, plural: str) -> web.StreamResponse:
        response, seen = web.StreamResponse(), int(request.query["resourceVersion"])
        if seen < self.oldest:
            return _json({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client or the watch has ended
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while not self.away:
                    changed = self._changed
                    for its_plural, line in self._events[seen:]:
                        seen += 1
                        if its_plural == plural:
                            await response.write(line)
                    if changed is self._changed:
                        await changed.wait()
        return _close(request) if self.away else response

    def put(self, plural: str, wanted: Object) -> Object:
        """Stores the object as its one manager wants it, with what the server and the controllers add."""
        key, fresh = (plural, wanted["metadata"]["name"]), _without_none(wanted)
        before = self.objects.get(key)
        head = {"namespace": "apps", "creationTimestamp": BORN, "uid": f"{' '.join(key)} {self._version}"}
        fresh["metadata"] = head | (before["metadata"] if before else {}) | fresh["metadata"]
        bound = {"phase": "Bound"} if plural == "persistentvolumeclaims" else {}
        fresh["status"] = before.get("status", {}) if before else bound
        if fresh != before:
            self.note(plural, fresh, "MODIFIED" if before else "ADDED")
        return self.objects[key]

    def delete(self, plural: str, name: str) -> None:
        if (found := self.objects.pop((plural, name), None)) is not None:
            self.note(plural, found, "DELETED")

    async def _end(self, plural: str, name: str) -> None:
        """Deletes an object, at once or later."""
        self.delete(plural, name)

    def note(self, plural: str, found: Object, kind: str = "MODIFIED") -> None:
        """Stores a changed object, and tells the watchers."""
        found["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        if kind != "DELETED":
            self.objects[plural, found["metadata"]["name"]] = found
        self._events.append((plural, json.dumps({"type": kind, "object": found}).encode() + b"\n"))
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _close(request: web.BaseRequest) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


def _json(value: Object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode() + b"\n", status=status, content_type="application/json")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
