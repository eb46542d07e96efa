"""The HTTP endpoint `/mcp` of all agent tools.

The SDK behind it takes longer to import than the rest of the gateway, and few processes ever need it. So a thread
imports it when an account holder first calls the endpoint, while others' streams go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from litestar import Request

from gateway.accounts.pacing import LANE
from gateway.errors import MethodNotAllowed, ServiceError
from gateway.http.authentication import require_account
from gateway.process import Gateway

if TYPE_CHECKING:
    from gateway.mcp.server import AgentSessions


CALL_SECONDS = 0.01  # that a call takes, about: the SDK works in tasks of its own


class AgentEndpoint:
    """The ASGI application at `/mcp`. `running` is its part of the gateway's lifespan."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions: asyncio.Future[AgentSessions] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @asynccontextmanager
    async def running(self, _: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._ending.set()
            if self._serving is not None:
                await self._serving

    # `Any`, because Litestar and the SDK have different types for ASGI.
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            request: Request[Any, Any, Any] = Request(scope)
            if request.method != "POST":
                raise MethodNotAllowed("POST")  # the other methods belong to sessions
            account = await require_account(request, self._gateway)
            await self._gateway.pacing.admit(account.id, scope["state"])
            scope["state"][LANE].charge(CALL_SECONDS)
            await (await self._loaded()).answer(account, scope, receive, send)
        except ServiceError as error:
            headers, body = error.render(scope["state"].get("request_id", ""))
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _loaded(self) -> AgentSessions:
        if self._sessions is None or (self._sessions.done() and self._sessions.exception() is not None):
            self._sessions = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._sessions))
        return await asyncio.shield(self._sessions)

    async def _serve(self, loaded: asyncio.Future[AgentSessions]) -> None:
        """In a task of its own, because the SDK wants to start and to end in the same one."""
        try:
            sessions = await asyncio.to_thread(self._load)
            async with sessions.running():
                loaded.set_result(sessions)
                await self._ending.wait()
        except Exception as error:
            if loaded.done():
                raise
            loaded.set_exception(error)

    def _load(self) -> AgentSessions:
        from gateway.mcp.server import AgentSessions

        return AgentSessions(self._gateway)
