"""Sends HTTP/1.1 byte by byte, for requests that no client library would send."""

import asyncio
import contextlib
import json
from dataclasses import dataclass

from tests.support.accounts import App


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


async def send(port: int, *parts: bytes, pause: float = 0, timeout: float = 10) -> Reply | None:
    """Sends the parts. Returns the response, or None if the server closed the connection without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        reading = asyncio.create_task(read_reply(reader))
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                if reading.done():
                    break
                await asyncio.sleep(pause)
        return await asyncio.wait_for(reading, timeout)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_reply(reader: asyncio.StreamReader) -> Reply | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read(2**20)
        return Reply(int(status.split(" ")[1]), headers, body)
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


def request(path: str, body: bytes = b'{"prompt":"x"}', *headers: str, method: str = "POST") -> bytes:
    """Returns a request, with a `Content-Length` unless `headers` already describe the body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", *headers]
    named = " ".join(headers).lower()
    if "content-type" not in named:
        lines.append("Content-Type: application/json")
    if "content-length" not in named and "transfer-encoding" not in named:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def bearer(app: App) -> str:
    return f"Authorization: Bearer {app.token()}"


def error_of(reply: Reply | None) -> tuple[int, str]:
    """Returns status and code of an error."""
    assert reply
    return reply.status, json.loads(reply.body)["error"]["code"]


async def is_healthy(app: App) -> bool:
    """Returns whether the app's other requests are still answered."""
    return (await app.ask("x", token=app.token("healthy"))).status_code == 200
