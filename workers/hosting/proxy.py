"""Forwards requests to an app's start command and streams its answers back.

Each request uses a new connection. The app may close a kept connection just when a request is sent over it, and not
every request can be sent twice. When the app breaks off an answer, so does the forwarder, so that an incomplete answer
never looks complete.

All apps share a parent domain. An app's cookies reach that app alone: a `Domain` that would send them to the others is
removed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from workers.hosting.limits import Patience
from workers.hosting.splice import Splice

TIMEOUTS = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=300)
NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# These headers concern one connection only; `Expect` is answered here. The client's Host is forwarded, because the app
# builds its own addresses from it.
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
ADDED_BY_AIOHTTP = ["Accept", "Accept-Encoding", "Content-Type", "User-Agent"]  # to requests without them


class Forwarder:
    """`apps_domain`: the domain that the apps share."""

    def __init__(self, apps_domain: str = "") -> None:
        self._apps_domain = apps_domain

    async def forward(self, request: web.Request, socket: str) -> web.StreamResponse:
        """`socket`: where the app is reached; empty while it does not run."""
        if not socket:
            return _unavailable()
        if request.headers.get("Upgrade", "").lower() == "websocket" and request.method == "GET":
            return await self._switch(request, socket)
        async with _connect_to(socket) as client:
            return await self._forward(request, client)

    async def _forward(self, request: web.Request, client: aiohttp.ClientSession) -> web.StreamResponse:
        url = URL(f"http://localhost{request.raw_path}", encoded=True)
        patience = Patience()
        body = _read_body(request, patience) if request.body_exists else None
        try:
            answer = await client.request(
                request.method, url, headers=_request_headers(request), data=body, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError):
            return _too_slow() if patience.exhausted else _unavailable()
        async with answer:
            if answer.status < 200:  # such as a switch to a protocol that was not requested
                return _unavailable()
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=self._answer_headers(request, answer.headers)
            )
            try:
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    async with patience.waiting():
                        await response.write(part)
                    patience.earn(len(part))
            except (aiohttp.ClientError, TimeoutError):
                if request.transport is not None:
                    request.transport.abort()
            return response

    def _answer_headers(self, request: web.Request, answer: Mapping[str, str]) -> CIMultiDict[str]:
        headers = _end_to_end_headers(answer)
        if cookies := headers.popall("Set-Cookie", None):
            host = request.headers["Host"].partition(":")[0].lower().removesuffix(".")
            for cookie in cookies:
                headers.add("Set-Cookie", keep_cookie_to_app(cookie, host, self._apps_domain))
        return headers

    async def _switch(self, request: web.Request, socket: str) -> web.StreamResponse:
        """To the WebSocket protocol, if the app agrees."""
        splice = Splice(request.protocol)
        try:
            status, headers = _read_answer(await splice.ask(socket, _upgrade_request(request)))
            if status != 101 or headers.get("Upgrade", "").lower() != "websocket":
                return web.Response(status=status) if status >= 400 else _unavailable()
            lines = [f"{name}: {value}" for name, value in self._answer_headers(request, headers).items()]
            head = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket", *lines, "", ""]
            await splice.run("\r\n".join(head).encode("utf-8", "surrogateescape"))
            return _SwitchResponse()
        except (OSError, TimeoutError, ValueError):
            return _unavailable()
        finally:  # aiohttp cancels this when the visitor disconnects
            splice.close()


class _SwitchResponse(web.StreamResponse):
    """Stands for the answer in aiohttp, after everything was sent past it."""

    def __init__(self) -> None:
        super().__init__(status=101)
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> None:
        pass

    async def write_eof(self, data: bytes = b"") -> None:
        pass


def _connect_to(socket: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(socket, limit=0, force_close=True),
        timeout=TIMEOUTS,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=ADDED_BY_AIOHTTP,
    )


def keep_cookie_to_app(cookie: str, host: str, apps_domain: str) -> str:
    """Removes each `Domain` other than the app's own host that contains the apps' domain, or is inside it."""

    def is_shared(attribute: str) -> bool:
        name, _, value = attribute.partition("=")
        domain = value.strip().strip(".").lower()
        return (
            name.strip().lower() == "domain"
            and domain != host
            and (f".{apps_domain}".endswith(f".{domain}") or domain.endswith(f".{apps_domain}"))
        )

    first, *attributes = cookie.split(";")
    return ";".join([first, *(attribute for attribute in attributes if not is_shared(attribute))])


async def _read_body(request: web.Request, patience: Patience) -> AsyncIterator[bytes]:
    while True:
        async with patience.waiting():
            part = await request.content.readany()
        if not part:
            return
        patience.earn(len(part))
        yield part


def _too_slow() -> web.Response:
    response = web.Response(status=408, text="The request's body came too slowly.\n")
    response.force_close()
    return response


def _unavailable() -> web.Response:
    return web.Response(status=502, text="The app does not answer at the moment.\n", headers={"Retry-After": "1"})


def _request_headers(request: web.Request) -> CIMultiDict[str]:
    headers = _end_to_end_headers(request.headers)
    # Frameworks that turn headers into variables confuse X_Forwarded_For with X-Forwarded-For. nginx drops these too.
    for name in {name for name in headers if "_" in name}:
        headers.popall(name)
    for name in ("Forwarded", "X-Real-IP"):  # a visitor's own word; the proxy in front sets X-Forwarded-For alone
        headers.popall(name, None)
    addresses = [*request.headers.getall("X-Forwarded-For", []), request.remote or ""]
    headers["X-Forwarded-For"] = ", ".join(address for address in addresses if address)
    headers["X-Forwarded-Host"] = request.headers["Host"]
    headers["X-Forwarded-Proto"] = request.headers.get("X-Forwarded-Proto", request.scheme)
    return headers


def _upgrade_request(request: web.Request) -> bytes:
    headers = _request_headers(request)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = [f"GET {request.raw_path} HTTP/1.1", *lines, "Connection: Upgrade", "Upgrade: websocket", "", ""]
    return "\r\n".join(head).encode("utf-8", "surrogateescape")


def _read_answer(head: bytes) -> tuple[int, CIMultiDict[str]]:
    """Status and headers. Raises ValueError."""
    first, *lines = head.decode("utf-8", "surrogateescape").split("\r\n")
    version, status, *_ = first.split(" ")
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines:
        name, colon, value = line.partition(":")
        if not (colon and NAME.fullmatch(name)) or CONTROL.search(value):
            raise ValueError("the app's answer has a line that is no header")
        headers.add(name, value.strip())
    if version != "HTTP/1.1" or not 100 <= int(status) <= 599:
        raise ValueError("the app's answer is not HTTP/1.1")
    return int(status), headers


def _end_to_end_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in HOP_BY_HOP | named)
