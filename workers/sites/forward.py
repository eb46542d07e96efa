"""Passes requests on to an app's start command, and its answers back as they come.

Each has a connection of its own: over one that is kept, a request may meet its end, and not every request can be sent
twice. An answer that the app breaks off is broken off here too, so that half of one never looks whole.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

TIMEOUTS = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=300)
MESSAGE_BYTES = 16_777_216  # of a WebSocket
# Of one connection, so for the next hop only; `Expect` is answered here. The client's Host stays: the app builds its
# own addresses from it.
HOP_BY_HOP = {
    "connection",
    "expect",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
ADDED = ["Accept", "Accept-Encoding", "Content-Type", "User-Agent"]  # by the client, where a request has none

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class Forward:
    """Made while a loop runs."""

    def __init__(self) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=TIMEOUTS,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=ADDED,
        )

    async def answer(self, request: web.Request, port: int) -> web.StreamResponse:
        """`port`: the app's; 0 while it does not run."""
        if not port:
            return _away()
        url = URL(f"http://127.0.0.1:{port}{request.raw_path}", encoded=True)
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._bridge(request, url)
        body = request.content if request.body_exists else None
        try:
            answer = await self._client.request(
                request.method, url, headers=_asked(request), data=body, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError):
            return _away()
        async with answer:
            if answer.status < 200:  # it switches to what nobody asked for
                return _away()
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers)
            )
            try:
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
            except (aiohttp.ClientError, TimeoutError):
                if request.transport is not None:
                    request.transport.abort()
            return response

    async def _bridge(self, request: web.Request, url: URL) -> web.StreamResponse:
        headers = _asked(request)
        protocols = [p.strip() for p in headers.get("Sec-WebSocket-Protocol", "").split(",") if p.strip()]
        for name in [name for name in headers if name.lower().startswith("sec-websocket-")]:
            headers.popall(name, None)
        try:
            inner = await self._client.ws_connect(
                url, headers=headers, protocols=protocols, autoping=False, max_msg_size=MESSAGE_BYTES
            )
        except aiohttp.WSServerHandshakeError as refused:
            return web.Response(status=refused.status) if refused.status >= 400 else _away()
        except (aiohttp.ClientError, TimeoutError):
            return _away()
        async with inner:
            outer = web.WebSocketResponse(
                protocols=[inner.protocol] if inner.protocol else [], autoping=False, max_msg_size=MESSAGE_BYTES
            )
            await outer.prepare(request)
            ways = [asyncio.create_task(_carry(inner, outer)), asyncio.create_task(_carry(outer, inner))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:  # this is cancelled when the visitor's connection is gone
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                await inner.close(code=_close_code(outer))
                await outer.close(code=_close_code(inner))
        return outer

    async def close(self) -> None:
        await self._client.close()


def _away() -> web.Response:
    return web.Response(status=502, text="The app does not answer just now.\n", headers={"Retry-After": "1"})


def _asked(request: web.Request) -> CIMultiDict[str]:
    headers = _passed_on(request.headers)
    # Frameworks that turn headers into variables can't tell X_Forwarded_For from ours. nginx drops these too.
    for name in {name for name in headers if "_" in name}:
        headers.popall(name)
    seen = [*request.headers.getall("X-Forwarded-For", []), request.remote or ""]
    headers["X-Forwarded-For"] = ", ".join(address for address in seen if address)
    headers["X-Forwarded-Host"] = request.headers["Host"]
    headers["X-Forwarded-Proto"] = request.headers.get("X-Forwarded-Proto", request.scheme)
    return headers


def _passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in HOP_BY_HOP | named)


def _close_code(socket: Socket) -> int:
    code = socket.close_code
    return code if code not in (None, aiohttp.WSCloseCode.ABNORMAL_CLOSURE) else aiohttp.WSCloseCode.GOING_AWAY


async def _carry(source: Socket, target: Socket) -> None:
    async for message in source:
        match message.type:
            case aiohttp.WSMsgType.TEXT:
                await target.send_str(message.data)
            case aiohttp.WSMsgType.BINARY:
                await target.send_bytes(message.data)
            case aiohttp.WSMsgType.PING:
                await target.ping(message.data)
            case aiohttp.WSMsgType.PONG:
                await target.pong(message.data)
