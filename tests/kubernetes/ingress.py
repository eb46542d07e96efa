"""An ingress controller for the tests: passes requests on to the pods, as the cluster's Ingresses say.

Each request has a connection of its own, so the next one goes to the addresses that the EndpointSlices name by then. A
running one ends where it began. No request is repeated, so a test sees each failure.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self

from gateway.cancellation import run_in_background
from tests.kubernetes.watching import Watching
from tests.support.background import cancel
from tests.support.redis_servers import free_port

HEAD_BYTES = PIECE_BYTES = 65_536


class Ingress(Watching):
    """Listens on `port` of 127.0.0.1."""

    def __init__(self, server: str, token: str, *, slices: str) -> None:
        """`slices`: the version of the API of EndpointSlices."""
        paths = {
            "ingresses": "/apis/networking.k8s.io/v1/ingresses",
            "slices": f"/apis/discovery.k8s.io/{slices}/endpointslices",
        }
        super().__init__(server, token, paths)
        self.port = free_port()
        self.connections = 0
        self.answering: set[asyncio.Task[None]] = set()  # the event loop itself does not keep them

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        async with super().running():
            listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=HEAD_BYTES, backlog=4096)
            try:
                yield self
            finally:
                listener.close()
                await cancel(*self.answering)

    def find_pods(self, host: str, path: str) -> list[tuple[str, int]]:
        """Returns addresses and ports of the pods that answer for a path of a host name."""
        rules = [
            (len(rule["path"]), namespace, rule["backend"]["service"]["name"])
            for (namespace, _), ingress in self.objects["ingresses"].items()
            for each in ingress["spec"].get("rules", ())
            if each.get("host") == host
            for rule in each["http"]["paths"]
            if f"{path}/".startswith(f"{rule['path'].rstrip('/')}/")
        ]
        _, namespace, service = max(rules, default=(0, "", ""))
        return [
            (address, port["port"])
            for (of, _), each in self.objects["slices"].items()
            if (of, each["metadata"]["labels"]["kubernetes.io/service-name"]) == (namespace, service)
            for endpoint in each.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready", True)
            for address in endpoint["addresses"]
            for port in each["ports"]
        ]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering.add(task := asyncio.create_task(self._answer(reader, writer)))
        task.add_done_callback(self.answering.discard)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            headers = [(name.strip().lower(), line) for line in lines for name in [line.partition(b":")[0]]]
            host = next((line.partition(b":")[2].strip().decode() for name, line in headers if name == b"host"), "")
            kept = [line for name, line in headers if name != b"connection" and not name.startswith(b"x-forwarded")]
            upgrade = any(name == b"upgrade" for name, _ in headers)
            kept += [b"Connection: Upgrade" if upgrade else b"Connection: close", b"X-Forwarded-For: 203.0.113.7"]
            kept += [b"X-Forwarded-Proto: http", f"X-Forwarded-Host: {host}".encode()]
            self.connections += 1
            path = first.split(b" ")[1].partition(b"?")[0].decode()
            pods = self.find_pods(host.partition(":")[0], path)
            try:
                from_pod, to_pod = await asyncio.open_connection(*pods[self.connections % len(pods)])
            except (OSError, ZeroDivisionError):  # no pod answers, or there is none
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                to_pod.write(b"\r\n".join([first, *kept, b"", b""]))
                with contextlib.closing(to_pod):
                    async with run_in_background(copy(reader, to_pod)):
                        await copy(from_pod, writer)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
