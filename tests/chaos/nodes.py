"""Runs the Redis servers, and injects faults into them.

They are a cluster of three primaries and three replicas, a primary and two replicas under three Sentinels, or one
server. All keep append-only files. Where the system allows it, the first server's folder is a small file system of its
own, whose disk can be filled. Where libfaketime is installed, every server's clock can be changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from gateway.keys import PARTITION_TAGS
from tests.support.redis_servers import RedisServer, binary, form_cluster, free_port, is_in_sync, wait_for_servers

DISK_MIB = 256
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NODE_TIMEOUT_SECONDS = 2.0  # after which another node takes over
OPTIONS = (
    *(
        "--crash-memcheck-enabled",
        "no",
        "--appendfsync",
        "everysec",
        "--rdbcompression",
        "no",
        "--auto-aof-rewrite-min-size",
        "32mb",
    ),
    *("--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0"),
)
CLUSTER_OPTIONS = (
    *("--cluster-enabled", "yes", "--cluster-node-timeout", str(int(NODE_TIMEOUT_SECONDS * 1000))),
    *("--cluster-require-full-coverage", "no"),
)
# A primary that returns after its replacement accepts no writes.
SENTINEL_OPTIONS = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "10")
SERVICE = "gateway"

Slots = tuple[tuple[int, int], ...]  # the first and the last slot of each range


class Node(RedisServer):
    """A server with a file of settings, in which Sentinel stores its primary."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        super().__init__("valkey", *OPTIONS, *options, "--logfile", str(folder / "server.log"), folder=folder)
        self.frozen = False
        self.clock = folder / "clock"
        self.step_clock(0)
        faked = ""
        if FAKETIME is not None:
            faked = f"LD_PRELOAD={FAKETIME} FAKETIME_TIMESTAMP_FILE={self.clock}"
            faked += " FAKETIME_CACHE_DURATION=1 FAKETIME_DONT_FAKE_MONOTONIC=1"
        settings = folder / "server.conf"
        settings.touch()
        # RedisServer passes no environment, so a script sets it and becomes the server.
        wrapper = folder / "server.sh"
        wrapper.write_text(f'#!/bin/sh\nexport CHAOS=1 {faked}\nexec {self.binary} {settings} "$@"\n')
        wrapper.chmod(0o755)
        self.binary = str(wrapper)
        once = Retry(NoBackoff(), 1)  # because a connection may be lost
        self.connection = redis.asyncio.Redis(
            port=self.port, socket_timeout=1, socket_connect_timeout=1, retry=once, decode_responses=True
        )

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

    async def execute(self, *command: Any) -> Any:
        return await self.connection.execute_command(*command)


class Servers(ABC):
    """The servers of one topology. Every command has a timeout."""

    impossible: ClassVar[frozenset[str]] = frozenset()  # kinds of faults that this topology rules out

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.nodes: list[Node] = []
        self.has_disk = False

    @contextlib.contextmanager
    def run(self) -> Iterator[Servers]:
        disk = self._folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)]
        self.has_disk = subprocess.run(mount, check=False, capture_output=True).returncode == 0
        try:
            self._start()
            yield self
        finally:
            self._stop()
            for node in self.nodes:
                node.thaw()
                node.stop()
            if self.has_disk:
                for log in disk.glob("*/server.log"):
                    shutil.copy(log, self._folder / "disk-server.log")
                subprocess.run(["umount", disk], check=False)

    def _make_nodes(self, count: int, *options: str) -> None:
        folders = [self._folder / "disk" / "node", *(self._folder / f"node-{n}" for n in range(2, count + 1))]
        self.nodes = [Node(folder, *options) for folder in folders]
        for node in self.nodes:
            node.start()

    @abstractmethod
    def _start(self) -> None: ...

    def _stop(self) -> None:  # noqa: B027 (most topologies have only nodes)
        """Stops all processes other than the nodes."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    async def find_primaries(self) -> list[Node]:
        """Returns the nodes that take writes, in the order of `nodes`."""

    @abstractmethod
    async def takes_writes(self) -> bool:
        """Returns whether every partition takes a write, and a replica confirms it if there are replicas."""

    @abstractmethod
    async def is_whole(self) -> bool:
        """Returns whether all nodes run and each replica is in sync with its primary."""

    async def fail_over(self, replica: Node) -> None:
        raise NotImplementedError

    async def move_slot(self, tag: str, chance: int) -> None:
        raise NotImplementedError

    async def find_shard(self, tag: str) -> int:
        """Returns the number of the primary that has the partition."""
        return 0

    async def find_slots(self, node: Node) -> Slots | None:
        """Returns the slots of the node's shard; None for all."""
        return None

    async def execute(self, *command: Any) -> Any:
        """Runs the command on the node that has its key. Raises RedisError if no node answers."""
        error: Exception = redis.RedisError("no node can be reached")
        for node in await self._list_candidates():
            try:
                return await node.execute(*command)
            except (redis.RedisError, OSError) as fault:
                error = fault
        raise error if isinstance(error, redis.RedisError) else redis.RedisError(str(error))

    async def read_ttls(self, keys: Sequence[str]) -> dict[str, int]:
        """Returns the milliseconds to live of the existing keys, with one request to each primary."""

        async def read(node: Node) -> list[Any]:
            pipe = node.connection.pipeline(transaction=False)
            for key in keys:
                pipe.pttl(key)
            with contextlib.suppress(redis.RedisError, OSError):
                return await pipe.execute(raise_on_error=False)  # the error of a key that another node has
            return []

        answers = await asyncio.gather(*map(read, await self.find_primaries()))
        return {
            key: ttl
            for ttls in answers
            for key, ttl in zip(keys, ttls, strict=False)
            if isinstance(ttl, int) and ttl > 0
        }

    async def _list_candidates(self) -> list[Node]:
        return await self.find_primaries()

    # -- replication -----------------------------------------------------------------------------------------

    async def read_roles(self) -> dict[Node, dict[str, Any]]:
        """Returns the replication section of INFO from each node that answers."""
        found: dict[Node, dict[str, Any]] = {}
        for node in self.nodes:
            if node.reachable:
                with contextlib.suppress(redis.RedisError, OSError):
                    found[node] = await node.connection.info("replication")
        return found

    async def find_replica(self, primary: Node) -> Node | None:
        for node, info in (await self.read_roles()).items():
            if info["role"] == "slave" and info["master_port"] == primary.port:
                return node
        return None

    async def _replicas_are_in_sync(self, primaries: int) -> bool:
        roles = await self.read_roles()
        links = [info.get("master_link_status") for info in roles.values() if info["role"] == "slave"]
        return len(roles) == len(self.nodes) and links == ["up"] * (len(self.nodes) - primaries)

    # -- disk ------------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        filler = self._folder / "disk" / "filler"
        for size in (65536, 512):
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(bytes(size)):
                    pass

    def empty_disk(self) -> None:
        """Frees the disk. Restarts the node if it exits, as a supervisor does: a replica exits if it cannot write."""
        (self._folder / "disk" / "filler").unlink(missing_ok=True)
        node, deadline = self.nodes[0], time.monotonic() + 60
        while time.monotonic() < deadline:
            if node.has_ended:
                node.start()
            elif node.answers():
                break
            time.sleep(0.2)
        # As docs/redis.md says: a server that is killed before may not be able to read its append-only file.
        with node.client() as client, contextlib.suppress(redis.RedisError):
            client.bgrewriteaof()

    def list_files(self) -> Iterator[Path]:
        """Yields the append-only files, snapshots and logs of all nodes."""
        for node in self.nodes:
            assert node.folder is not None
            yield from (path for path in node.folder.rglob("*") if path.is_file())

    async def close(self) -> None:
        for node in self.nodes:
            await node.connection.aclose()


async def _takes_write(node: Node, replicas: int) -> bool:
    pipe = node.connection.pipeline(transaction=False)
    pipe.set("chaos", 1, ex=60)
    pipe.wait(replicas, 300)
    written, confirmed = await pipe.execute(raise_on_error=False)
    return written is True and confirmed >= replicas


class Single(Servers):
    """One server."""

    impossible = frozenset({"kill replica", "fail over", "move slot"})

    def _start(self) -> None:
        self._make_nodes(1)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.nodes[0].port}/0"

    async def find_primaries(self) -> list[Node]:
        return [node for node in self.nodes if node.reachable]

    async def takes_writes(self) -> bool:
        with contextlib.suppress(redis.RedisError, OSError):
            return self.nodes[0].reachable and await _takes_write(self.nodes[0], 0)
        return False

    async def is_whole(self) -> bool:
        return await self.takes_writes()


class Sentinels(Servers):
    """A primary and two replicas under three Sentinels, two of which must agree."""

    impossible = frozenset({"move slot"})

    def _start(self) -> None:
        self._make_nodes(3, *SENTINEL_OPTIONS)
        for node in self.nodes[1:]:
            with node.client() as client:
                client.execute_command("REPLICAOF", "127.0.0.1", self.nodes[0].port)
                client.execute_command("CONFIG", "REWRITE")
        wait_for_servers(lambda: all(map(is_in_sync, self.nodes[1:])))
        self._ports = [free_port() for _ in range(3)]
        self._processes = []
        for port in self._ports:
            folder = self._folder / f"sentinel-{port}"
            folder.mkdir()
            (folder / "sentinel.conf").write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder / 'sentinel.log'}\n"
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.nodes[0].port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {int(NODE_TIMEOUT_SECONDS * 1000)}\n"
                f"sentinel failover-timeout {SERVICE} 10000\n"
            )
            command = [binary("valkey"), str(folder / "sentinel.conf"), "--sentinel"]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        self._sentinels = [redis.asyncio.Redis(port=port, socket_timeout=1) for port in self._ports]
        wait_for_servers(lambda: all(map(self._sentinel_is_ready, self._ports)))

    def _sentinel_is_ready(self, port: int) -> bool:
        with contextlib.suppress(redis.RedisError), redis.Redis(port=port, socket_timeout=1) as client:
            state = client.execute_command("SENTINEL MASTER", SERVICE)
            return (int(state["num-slaves"]), int(state["num-other-sentinels"])) == (2, 2)
        return False

    def _stop(self) -> None:
        for process in getattr(self, "_processes", ()):
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self._ports)}/{SERVICE}"

    async def _find_primary_ports(self) -> set[int]:
        """Returns the primary's port according to each Sentinel."""
        answers = await asyncio.gather(
            *(sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE) for sentinel in self._sentinels)
        )
        return {int(port) for _, port in answers}

    async def find_primaries(self) -> list[Node]:
        ports = await self._find_primary_ports()
        return [node for node in self.nodes if {node.port} == ports and node.reachable]

    async def takes_writes(self) -> bool:
        with contextlib.suppress(redis.RedisError, OSError):
            return any([await _takes_write(node, 1) for node in await self.find_primaries()])
        return False

    async def is_whole(self) -> bool:
        return await self._replicas_are_in_sync(1) and await self.takes_writes()

    async def fail_over(self, replica: Node) -> None:
        """Starts a coordinated failover. Sentinel chooses the replica. A plain one forgets writes (docs/redis.md)."""
        await self._sentinels[0].execute_command("SENTINEL FAILOVER", SERVICE, "COORDINATED")

    async def close(self) -> None:
        await super().close()
        for sentinel in self._sentinels:
            await sentinel.aclose()


class Cluster(Servers):
    """Three primaries and three replicas."""

    def _start(self) -> None:
        self._make_nodes(6, *CLUSTER_OPTIONS)
        form_cluster(self.nodes[:3], self.nodes[3:])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    async def find_primaries(self) -> list[Node]:
        ports = {_find_primary_port(shard) for shard in await self._read_shards() if shard["slots"]}
        return [node for node in self.nodes if node.port in ports]

    async def _list_candidates(self) -> list[Node]:
        return [node for node in self.nodes if node.reachable]

    async def _read_shards(self) -> list[dict[str, Any]]:
        """Returns the shards that the first reachable node knows."""
        for node in self.nodes:
            if node.reachable:
                with contextlib.suppress(redis.RedisError, OSError):
                    shards: list[dict[str, Any]] = await node.execute("CLUSTER SHARDS")
                    return shards
        return []

    async def takes_writes(self) -> bool:
        written: set[str] = set()
        try:
            for node in self.nodes:
                if not node.reachable:
                    continue
                if (await node.execute("CLUSTER INFO"))["cluster_state"] != "ok":
                    return False
                pipe = node.connection.pipeline(transaction=False)
                for tag in PARTITION_TAGS:
                    pipe.set(f"{tag}:chaos", 1, ex=60)
                pipe.wait(1, 300)
                *answers, replicas = await pipe.execute(raise_on_error=False)
                if replicas == 1:
                    written |= {tag for tag, ok in zip(PARTITION_TAGS, answers, strict=True) if ok is True}
        except (redis.RedisError, OSError):
            return False
        return len(written) == len(PARTITION_TAGS)

    async def is_whole(self) -> bool:
        return await self._replicas_are_in_sync(3) and await self.takes_writes()

    async def fail_over(self, replica: Node) -> None:
        await replica.execute("CLUSTER FAILOVER")

    # -- slots -----------------------------------------------------------------------------------------------

    async def move_slot(self, tag: str, chance: int) -> None:
        """Moves a partition's slot to another primary, ten keys at a time, while it is in use."""
        primaries, slot = await self.find_primaries(), key_slot(tag.encode())
        source = (await self.find_primaries())[await self.find_shard(tag)]
        target = [node for node in primaries if node is not source][chance % (len(primaries) - 1)]
        source_id, target_id = [await node.execute("CLUSTER MYID") for node in (source, target)]
        await target.execute("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        await source.execute("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        while names := await source.execute("CLUSTER GETKEYSINSLOT", slot, 10):
            await source.execute("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
            await asyncio.sleep(0.02)
        for node in [target, source, *(other for other in primaries if other not in (source, target))]:
            await node.execute("CLUSTER SETSLOT", slot, "NODE", target_id)

    async def find_shard(self, tag: str) -> int:
        slot = key_slot(tag.encode())
        for number, node in enumerate(await self.find_primaries()):
            if any(first <= slot <= last for first, last in await self.find_slots(node) or ()):
                return number
        raise LookupError(f"no primary has {tag}")

    async def find_slots(self, node: Node) -> Slots | None:
        for shard in await self._read_shards():
            if any(member["port"] == node.port for member in shard["nodes"]):
                return tuple(zip(shard["slots"][::2], shard["slots"][1::2], strict=True))
        return None


TOPOLOGIES: dict[str, type[Servers]] = {"cluster": Cluster, "sentinel": Sentinels, "single": Single}


def _find_primary_port(shard: dict[str, Any]) -> int | None:
    primaries = (node for node in shard["nodes"] if (node["role"], node["health"]) == ("master", "online"))
    return next((node["port"] for node in primaries), None)
