"""A cluster of three primaries and three replicas that keep append-only files, and what can be done to it.

One node's folder is a small file system of its own, where the system allows that, so that its disk can be filled; and
every node's clock can be stepped where libfaketime is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from gateway.store import keys
from tests.support.redis_servers import SLOTS, RedisServer

DISK_MIB = 256
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NODE_TIMEOUT = 2.0  # seconds after which a node is failed over
OPTIONS = (
    *("--cluster-enabled", "yes", "--cluster-node-timeout", str(int(NODE_TIMEOUT * 1000))),
    *("--appendfsync", "everysec", "--rdbcompression", "no", "--auto-aof-rewrite-min-size", "32mb"),
    *("--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0"),
)


class Node(RedisServer):
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__("valkey", *OPTIONS, "--logfile", str(folder / "server.log"), folder=folder)
        self.frozen = False
        self.clock = folder / "clock"
        self.step_clock(0)
        if FAKETIME is not None:
            # A program that sets the environment and becomes the server, because the server takes no environment.
            self.wrapper = folder / "server.sh"
            self.wrapper.write_text(
                f"#!/bin/sh\nexport LD_PRELOAD={FAKETIME} FAKETIME_TIMESTAMP_FILE={self.clock}"
                f' FAKETIME_CACHE_DURATION=1 FAKETIME_DONT_FAKE_MONOTONIC=1\nexec {self.binary} "$@"\n'
            )
            self.wrapper.chmod(0o755)
            self.binary = str(self.wrapper)
        self.connection = redis.asyncio.Redis(port=self.port, socket_timeout=1, socket_connect_timeout=1)

    @property
    def reachable(self) -> bool:
        return self.running and not self.frozen

    def step_clock(self, seconds: float) -> None:
        self.clock.write_text(f"{seconds:+.0f}s\n" if seconds else "+0\n")

    def freeze(self) -> None:
        self.frozen = True
        super().freeze()

    def thaw(self) -> None:
        self.frozen = False
        with contextlib.suppress(AssertionError):
            super().thaw()

    async def ask(self, *command: Any) -> Any:
        return await self.connection.execute_command(*command)


class Cluster:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.disk = folder / "node-1"
        self.nodes: list[Node] = []
        self._folder = folder
        self.has_disk = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        try:
            self._start()
            yield self
        finally:
            for node in self.nodes:
                node.thaw()
                node.stop()
            if self.has_disk:
                subprocess.run(["umount", self._folder / "disk"], check=False)

    def _start(self) -> None:
        disk = self._folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)]
        self.has_disk = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        folders = [disk / "node" if n == 0 else self._folder / f"node-{n + 1}" for n in range(6)]
        self.nodes = [Node(folder) for folder in folders]
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            with node.client() as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        for node, first, end in zip(self.nodes[:3], SLOTS, SLOTS[1:], strict=False):
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        self._wait(lambda: all(self._knows(node) for node in self.nodes))
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            with primary.client() as client:
                own = client.execute_command("CLUSTER MYID")
            with replica.client() as client:
                client.execute_command("CLUSTER REPLICATE", own)
        self._wait(lambda: all(self._follows(node) for node in self.nodes[3:]))

    def _knows(self, node: Node) -> bool:
        with node.client() as client:
            info = client.execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "6"

    def _follows(self, node: Node) -> bool:
        with node.client() as client:
            return client.info("replication").get("master_link_status") == "up"

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the cluster did not form")
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    async def ask(self, *command: Any) -> Any:
        """The node that has the command's key; raises RedisError if none answers."""
        error: Exception = redis.RedisError("no node can be reached")
        for node in self.nodes:
            if node.reachable:
                try:
                    return await node.ask(*command)
                except (redis.RedisError, OSError) as fault:
                    error = fault
        raise error if isinstance(error, redis.RedisError) else redis.RedisError(str(error))

    # -- what is true now ------------------------------------------------------------------------------------

    async def roles(self) -> dict[Node, dict[str, Any]]:
        """The replication of each node that answers."""
        found: dict[Node, dict[str, Any]] = {}
        for node in self.nodes:
            if node.reachable:
                with contextlib.suppress(redis.RedisError, OSError):
                    found[node] = await node.connection.info("replication")
        return found

    async def primaries(self) -> list[Node]:
        """Those with slots, in the order of the nodes."""
        for node in self.nodes:
            if node.reachable:
                with contextlib.suppress(redis.RedisError, OSError):
                    ranges = await node.ask("CLUSTER SHARDS")
                    ports = {_port(shard) for shard in map(_fields, ranges) if shard["slots"]}
                    return [other for other in self.nodes if other.port in ports]
        return []

    async def replica_of(self, primary: Node) -> Node | None:
        for node, info in (await self.roles()).items():
            if info["role"] == "slave" and info["master_port"] == primary.port:
                return node
        return None

    async def takes_writes(self) -> bool:
        """Every node that answers says that the cluster is whole; every partition takes a write and replicates it."""
        written: set[str] = set()
        try:
            for node in self.nodes:
                if not node.reachable:
                    continue
                info = await node.ask("CLUSTER INFO")
                if "cluster_state:ok" not in _text(info):
                    return False
                pipe = node.connection.pipeline(transaction=False)
                for tag in keys.TAGS:
                    pipe.set(f"{tag}:chaos", 1, ex=60)
                pipe.wait(1, 300)
                *answers, replicas = await pipe.execute(raise_on_error=False)
                if replicas == 1:
                    written |= {tag for tag, ok in zip(keys.TAGS, answers, strict=True) if ok is True}
        except (redis.RedisError, OSError):
            return False
        return len(written) == len(keys.TAGS)

    async def is_whole(self) -> bool:
        """All six nodes run, and each replica is in step with its primary."""
        roles = await self.roles()
        links = [info.get("master_link_status") for info in roles.values() if info["role"] == "slave"]
        return len(roles) == 6 and links == ["up"] * 3 and await self.takes_writes()

    # -- slots -----------------------------------------------------------------------------------------------

    async def move_slot(self, tag: str, chance: int) -> None:
        """Moves a partition's slot to another primary, key by key, while it is used."""
        primaries = await self.primaries()
        slot = int(await primaries[0].ask("CLUSTER KEYSLOT", tag))
        owners = await self._owners(slot)
        source = next(node for node in primaries if node in owners)
        target = [node for node in primaries if node is not source][chance % (len(primaries) - 1)]
        source_id, target_id = [_text(await node.ask("CLUSTER MYID")) for node in (source, target)]
        await target.ask("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        await source.ask("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        while names := await source.ask("CLUSTER GETKEYSINSLOT", slot, 10):
            await source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
            await asyncio.sleep(0.02)
        for node in [target, source, *(other for other in primaries if other not in (source, target))]:
            await node.ask("CLUSTER SETSLOT", slot, "NODE", target_id)

    async def shard(self, tag: str) -> int:
        """The number of the primary that has a partition."""
        primaries = await self.primaries()
        owners = await self._owners(int(await primaries[0].ask("CLUSTER KEYSLOT", tag)))
        return next(number for number, node in enumerate(primaries) if node in owners)

    async def _owners(self, slot: int) -> list[Node]:
        """Of the shard with this slot, its primary."""
        for node in await self.primaries():
            for shard in map(_fields, await node.ask("CLUSTER SHARDS")):
                bounds = shard["slots"]
                if any(first <= slot <= last for first, last in zip(bounds[::2], bounds[1::2], strict=True)):
                    return [other for other in self.nodes if other.port == _port(shard)]
        return []

    # -- disk ------------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        filler = self._folder / "disk" / "filler"
        for size in (65536, 512):
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(bytes(size)):
                    pass

    def empty_disk(self) -> None:
        """A replica ends when it cannot write. It is started again, as by a supervisor."""
        (self._folder / "disk" / "filler").unlink(missing_ok=True)
        if self.nodes[0].has_ended:
            self.nodes[0].start()

    def files(self) -> Iterator[Path]:
        """Append-only files, snapshots and logs of all nodes."""
        for node in self.nodes:
            assert node.folder is not None
            yield from (path for path in node.folder.rglob("*") if path.is_file())

    async def close(self) -> None:
        for node in self.nodes:
            await node.connection.aclose()


def _fields(values: Sequence[Any] | dict[Any, Any]) -> dict[str, Any]:
    """A map that came as a list, as RESP 2 has it."""
    if isinstance(values, dict):
        return {_text(name): value for name, value in values.items()}
    return {_text(name): value for name, value in zip(values[::2], values[1::2], strict=True)}


def _port(shard: dict[str, Any]) -> int | None:
    """Of a shard's primary."""
    for node in map(_fields, shard["nodes"]):
        if _text(node["role"]) == "master" and _text(node["health"]) == "online":
            return int(node["port"])
    return None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{_text(name)}:{_text(field)}" for name, field in value.items())
    return value.decode() if isinstance(value, bytes) else str(value)
