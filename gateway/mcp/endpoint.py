"""The HTTP endpoint `/mcp` of all agent tools.

Importing the MCP SDK takes longer than importing the rest of the services, and few processes ever need it. A thread
imports it when an account first calls the endpoint, and running streams continue meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from litestar import Request

from gateway.api.authentication import CallerCheck, name_access, require_access
from gateway.api.bodies import declared_size
from gateway.errors import MethodNotAllowed, ServiceError
from gateway.services import Services

if TYPE_CHECKING:
    from gateway.mcp.server import AgentSessions

MESSAGE_BYTES = 4_194_304  # of a call; `service_publish` has the files of an app
CALL_SECONDS = 0.01  # approximate cost of a call: the SDK works in tasks of its own, which are not measured


async def read_message(receive: Any) -> Callable[[], Awaitable[Any]]:
    """Reads the whole body, and returns a `receive` that repeats it. Of a body that is too large, it reads no more."""
    parts: deque[Any] = deque()
    size = 0
    while size <= MESSAGE_BYTES:
        message = await receive()
        parts.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            break

    async def replay() -> Any:
        return parts.popleft() if parts else await receive()

    return replay


class AgentEndpoint:
    """The ASGI application at `/mcp`. The gateway's lifespan includes `running`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._sessions: asyncio.Future[AgentSessions] | None = None
        self._running: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._ending.set()
            if self._running is not None:
                await self._running

    # `Any`, because Litestar and the SDK have different types for ASGI.
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            request: Request[Any, Any, Any] = Request(scope)
            if request.method != "POST":
                raise MethodNotAllowed("POST")  # the other methods belong to sessions
            find = partial(require_access, request, self._services.registry, self._services.sessions)
            check = CallerCheck(find, name_access)
            access = await check.run()
            meter = self._services.pacing.meter(access.account.id, access.who, scope["state"])
            size = declared_size(request)
            async with meter.receiving(size):
                # A message that is declared as too large is not read.
                replay = await read_message(receive) if (size or 0) <= MESSAGE_BYTES else receive
                await meter.enter()
            meter.charge(CALL_SECONDS)
            sessions = await self._load_sessions()
            await sessions.answer(await check.confirm(), scope, replay, send)
        except ServiceError as error:
            headers, body = error.render(scope["state"].get("request_id", ""))
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _load_sessions(self) -> AgentSessions:
        if self._sessions is None or (self._sessions.done() and self._sessions.exception() is not None):
            self._sessions = asyncio.get_running_loop().create_future()
            self._running = asyncio.create_task(self._run(self._sessions))
        return await asyncio.shield(self._sessions)

    async def _run(self, loading: asyncio.Future[AgentSessions]) -> None:
        """Runs in a task of its own, because the SDK must start and end in the same task."""
        try:
            sessions = await asyncio.to_thread(self._create_sessions)
            async with sessions.running():
                loading.set_result(sessions)
                await self._ending.wait()
        except Exception as error:
            if loading.done():
                raise
            loading.set_exception(error)

    def _create_sessions(self) -> AgentSessions:
        from gateway.mcp.server import AgentSessions

        return AgentSessions(self._services, MESSAGE_BYTES)
