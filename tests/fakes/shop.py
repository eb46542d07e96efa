"""A hosted app that records its requests and behaves as their path says."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Self

import aiohttp
from aiohttp import web


class Shop:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.go_on = asyncio.Event()
        self.left = self.sockets = self.endless = 0
        self.cookies: list[str] = []
        self.closed_with: list[int | None] = []

    @contextlib.asynccontextmanager
    async def listening(self, path: str) -> AsyncIterator[Self]:
        """Answers at a Unix socket."""
        server = web.Server(self.answer, handler_cancellation=True, auto_decompress=False)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.UnixSite(runner, path).start()
            os.chmod(path, 0o666)
            yield self
        finally:
            self.go_on.set()
            await runner.cleanup()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/events":
                return await self.events(request)
            case "/endless":
                return await self.send_endlessly(request)
            case "/cookies":
                return web.Response(headers=[("Set-Cookie", cookie) for cookie in self.cookies])
            case "/socket":
                return await self.socket(request)
            case "/no-socket":
                return web.Response(status=403)
            case "/early":
                return web.Response(status=413)
            case "/cut":
                response = web.StreamResponse(headers={} if "chunked" in request.query else {"Content-Length": "99"})
                await response.prepare(request)
                await response.write(b"half")
                assert request.transport is not None
                request.transport.close()
                return response
            case "/headers":
                cookies = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2"), ("X-Accel-Redirect", "/index.html")]
                kept = [("Cache-Control", "max-age=60"), ("Location", "http://apps/x"), ("Content-Type", "text/html")]
                return web.Response(status=201, reason="Made", headers=[*cookies, *kept], body=b"made")
        body = await request.content.read()  # `read` has a limit
        self.seen.append((request.method, request.raw_path, dict(request.headers), body))
        return web.json_response({"size": len(body)})

    async def events(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await response.write(b"data: first\n\n")
            await self.go_on.wait()
            await response.write(b"data: second\n\n")
        except asyncio.CancelledError:
            self.left += 1
            raise
        return response

    async def send_endlessly(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.endless += 1
        try:
            while True:
                await response.write(b"x" * 65_536)
        except (asyncio.CancelledError, OSError):
            self.left += 1
            raise

    async def socket(self, request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=["chat"])
        await socket.prepare(request)
        self.sockets += 1
        try:
            async for message in socket:
                if message.data == "bye":
                    await socket.close(code=4001)
                elif message.type is aiohttp.WSMsgType.BINARY:
                    await socket.send_bytes(message.data)
                else:
                    await socket.send_str(f"{message.data} {request.headers['Host']}")
        finally:  # canceled if the connection was lost
            self.closed_with.append(socket.close_code)
        return socket
