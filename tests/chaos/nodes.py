"""Runs the service's processes, and a Redis Cluster of three primaries and three replicas with append-only files.

A process that was killed starts again a second later, as under a supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from gateway.keys import PARTITION_TAGS
from tests.support.redis_servers import RedisServer, form_cluster

RESTART_SECONDS = 1.0  # between the end of a process and its restart


class Process:
    """A process of the service. `ends` lists its exits that no fault caused: each is a violation."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log_file = name, log
        self.command, self.environment = command, dict(environment)
        self.frozen = False
        self.started_at = 0.0
        self.ends: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._ended_at = 0.0

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log_file.parent,
                start_new_session=True,
            )
        self._killed, self.frozen, self.started_at = False, False, time.monotonic()

    def kill(self) -> None:
        if self._process is not None:
            self._killed = True
            self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self.frozen = False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def supervise(self) -> None:
        """Restarts the process if it has ended. Call this often."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        now = time.monotonic()
        if not self._ended_at:
            self._ended_at = now
            if not self._killed:
                self.ends.append(f"{self.name} ended by itself with status {code}; its log is {self.log_file.name}")
        elif now > self._ended_at + RESTART_SECONDS:
            self._ended_at = 0.0
            self.start()

    async def stop(self) -> None:
        if self._process is None:
            return
        self.thaw()
        self._signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, 15)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process = None


class Fleet:
    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}

    def add(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Process:
        basics = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": os.getcwd()}
        process = Process(name, command, {**basics, **environment}, folder / f"{name}.log")
        self.processes[name] = process
        return process

    def find_by_kind(self, kind: str) -> list[Process]:
        return [process for name, process in self.processes.items() if name.startswith(f"{kind}-")]

    async def supervise(self) -> None:
        while True:
            for process in self.processes.values():
                process.supervise()
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes.values()))


OPTIONS = (
    *("--crash-memcheck-enabled", "no", "--appendfsync", "everysec", "--rdbcompression", "no"),
    *("--auto-aof-rewrite-min-size", "32mb", "--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0"),
    *("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"),
)

Slots = tuple[tuple[int, int], ...]  # the first and the last slot of each range


class Node(RedisServer):
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__("valkey", *OPTIONS, "--logfile", str(folder / "server.log"), folder=folder)
        self.frozen = False
        once = Retry(NoBackoff(), 1)  # because a connection may be lost
        self.connection = redis.asyncio.Redis(
            port=self.port, socket_timeout=1, socket_connect_timeout=1, retry=once, decode_responses=True
        )

    @property
    def reachable(self) -> bool:
        return self.running and not self.frozen

    def freeze(self) -> None:
        self.frozen = True
        super().freeze()

    def thaw(self) -> None:
        self.frozen = False
        with contextlib.suppress(AssertionError):
            super().thaw()

    async def execute(self, *command: Any) -> Any:
        return await self.connection.execute_command(*command)  # type: ignore[no-untyped-call]


class Cluster:
    """The servers. Every command has a timeout."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.nodes: list[Node] = []

    @contextlib.contextmanager
    def run(self) -> Iterator[Cluster]:
        self.nodes = [Node(self._folder / f"node-{n}") for n in range(1, 7)]
        try:
            for node in self.nodes:
                node.start()
            form_cluster(self.nodes[:3], self.nodes[3:])
            yield self
        finally:
            for node in self.nodes:
                node.thaw()
                node.stop()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    async def find_primaries(self) -> list[Node]:
        """Returns the nodes that take writes, in the order of `nodes`."""
        ports = {_find_primary_port(shard) for shard in await self._read_shards() if shard["slots"]}
        return [node for node in self.nodes if node.port in ports]

    async def _read_shards(self) -> list[dict[str, Any]]:
        """Returns the shards that the first reachable node knows."""
        for node in self._list_reachable():
            with contextlib.suppress(redis.RedisError, OSError):
                shards: list[dict[str, Any]] = await node.execute("CLUSTER SHARDS")
                return shards
        return []

    async def takes_writes(self) -> bool:
        """Returns whether every partition takes a write, and a replica confirms it."""
        written: set[str] = set()
        try:
            for node in self._list_reachable():
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

    async def execute(self, *command: Any) -> Any:
        """Runs the command on the node that has its key. Raises RedisError if no node answers."""
        error: Exception = redis.RedisError("no node can be reached")
        for node in self._list_reachable():
            try:
                return await node.execute(*command)
            except (redis.RedisError, OSError) as fault:
                error = fault
        raise error if isinstance(error, redis.RedisError) else redis.RedisError(str(error))

    def _list_reachable(self) -> list[Node]:
        return [node for node in self.nodes if node.reachable]

    # -- replication -----------------------------------------------------------------------------------------

    async def read_roles(self) -> dict[Node, dict[str, Any]]:
        """Returns the replication section of INFO from each node that answers."""
        found: dict[Node, dict[str, Any]] = {}
        for node in self._list_reachable():
            with contextlib.suppress(redis.RedisError, OSError):
                found[node] = await node.connection.info("replication")
        return found

    async def find_replica(self, primary: Node) -> Node | None:
        for node, info in (await self.read_roles()).items():
            if info["role"] == "slave" and info["master_port"] == primary.port:
                return node
        return None

    async def is_whole(self) -> bool:
        """Returns whether all nodes run and each replica is in sync with its primary."""
        roles = await self.read_roles()
        links = [info.get("master_link_status") for info in roles.values() if info["role"] == "slave"]
        return len(roles) == len(self.nodes) and links == ["up"] * 3 and await self.takes_writes()

    # -- slots -----------------------------------------------------------------------------------------------

    async def move_slot(self, tag: str, chance: int) -> None:
        """Moves a partition's slot to another primary, ten keys at a time, while it is in use."""
        primaries, slot = await self.find_primaries(), key_slot(tag.encode())
        source = primaries[await self.find_shard(tag)]
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
        """Returns the number of the primary that has the partition."""
        slot = key_slot(tag.encode())
        for number, node in enumerate(await self.find_primaries()):
            if any(first <= slot <= last for first, last in await self.find_slots(node) or ()):
                return number
        raise LookupError(f"no primary has {tag}")

    async def find_slots(self, node: Node) -> Slots | None:
        """Returns the slots of the node's shard."""
        for shard in await self._read_shards():
            if any(member["port"] == node.port for member in shard["nodes"]):
                return tuple(zip(shard["slots"][::2], shard["slots"][1::2], strict=True))
        return None

    def list_files(self) -> Iterator[Path]:
        """Yields the append-only files, snapshots and logs of all nodes."""
        for node in self.nodes:
            assert node.folder is not None
            yield from (path for path in node.folder.rglob("*") if path.is_file())

    async def close(self) -> None:
        for node in self.nodes:
            await node.connection.aclose()


def _find_primary_port(shard: dict[str, Any]) -> int | None:
    primaries = (node for node in shard["nodes"] if (node["role"], node["health"]) == ("master", "online"))
    return next((node["port"] for node in primaries), None)
