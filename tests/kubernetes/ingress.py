"""An ingress controller for the tests: passes requests on to the pods, as the cluster's Ingresses say.

It watches Ingresses and Endpoints. Each request has a connection of its own, so the next one goes to the pods that the
Endpoints name by then, and a running one ends where it began. It never repeats a request, so a test sees each failure.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.support.redis_servers import free_port

RESOURCES = {
    "ingresses": "apis/networking.k8s.io/v1/namespaces/{namespace}/ingresses",
    "endpoints": "api/v1/namespaces/{namespace}/endpoints",
}
HEAD_BYTES = 65_536
PIECE_BYTES = 65_536


class Ingress:
    """Listens on `port` of 127.0.0.1."""

    def __init__(self, server: str, token: str, namespace: str) -> None:
        self.server, self.token, self.namespace = server, token, namespace
        self.port = free_port()
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in RESOURCES}
        self.connections = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Ingress"]:
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(
            self.server, headers=headers, connector=aiohttp.TCPConnector(ssl=trust)
        ) as session:
            followers = [asyncio.create_task(self._follow(session, kind)) for kind in RESOURCES]
            listener = await asyncio.start_server(self._answer, "127.0.0.1", self.port, limit=HEAD_BYTES, backlog=4096)
            try:
                yield self
            finally:
                listener.close()
                for follower in followers:
                    follower.cancel()
                await asyncio.gather(*followers, return_exceptions=True)

    async def _follow(self, session: aiohttp.ClientSession, kind: str) -> None:
        """Keeps the objects of one kind. While the API server is away, the last ones are used."""
        path = "/" + RESOURCES[kind].format(namespace=self.namespace)
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, KeyError, ValueError):
                async with session.get(path) as answer:
                    listed = json.loads(await answer.read())
                self.objects[kind] = {each["metadata"]["name"]: each for each in listed["items"]}
                since = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
                async with session.get(
                    path, params=since, timeout=aiohttp.ClientTimeout(total=None, sock_read=None), read_bufsize=1 << 22
                ) as answer:
                    async for line in answer.content:
                        change = json.loads(line)
                        if change["type"] == "DELETED":
                            self.objects[kind].pop(change["object"]["metadata"]["name"], None)
                        else:
                            self.objects[kind][change["object"]["metadata"]["name"]] = change["object"]
            await asyncio.sleep(0.1)

    def find(self, host: str) -> list[tuple[str, int]]:
        """Returns the pods that answer for a host name."""
        for ingress in self.objects["ingresses"].values():
            for rule in ingress["spec"].get("rules", ()):
                if rule.get("host") == host:
                    backend = rule["http"]["paths"][0]["backend"]["service"]
                    endpoints = self.objects["endpoints"].get(backend["name"], {})
                    return [
                        (address["ip"], port["port"])
                        for subset in endpoints.get("subsets") or ()
                        for address in subset.get("addresses") or ()
                        for port in subset["ports"]
                    ]
        return []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            names = [line.partition(b":")[0].strip().lower() for line in lines]
            host = next(
                (line.partition(b":")[2] for line, name in zip(lines, names, strict=True) if name == b"host"), b""
            )
            kept = [
                line
                for line, name in zip(lines, names, strict=True)
                if not name.startswith((b"connection", b"x-forwarded"))
            ]
            kept.append(b"Connection: " + (b"Upgrade" if b"upgrade" in names else b"close"))
            kept += [b"X-Forwarded-For: 203.0.113.7", b"X-Forwarded-Proto: http", b"X-Forwarded-Host:" + host]
            pods = self.find(host.decode().strip().rpartition(":")[0] or host.decode().strip())
            self.connections += 1
            try:
                pod = await asyncio.open_connection(*pods[self.connections % len(pods)]) if pods else None
            except OSError:
                pod = None
            if pod is None:
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                pod[1].write(b"\r\n".join([first, *kept, b"", b""]))
                sending = asyncio.create_task(copy(reader, pod[1]))
                await copy(pod[0], writer)
                sending.cancel()
                pod[1].close()
        writer.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
