import asyncio
import contextlib
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.polling import wait_until
from tests.support.redis_servers import RedisServer
from tests.support.sandbox import Room
from workers.sandbox import network
from workers.sandbox.sandbox import SandboxLimits

# Each attack prints the addresses that it reached. The targets are Redis, the gateway or another app on this machine,
# at every address of the machine.
ATTACK = """
import socket, struct, sys
targets, port = sys.argv[2].split(","), int(sys.argv[3])
kinds = {
    "tcp": (socket.AF_INET, socket.SOCK_STREAM, 0),
    "mptcp": (socket.AF_INET, socket.SOCK_STREAM, 262),
    "sctp": (socket.AF_INET, socket.SOCK_STREAM, 132),
    "fastopen": (socket.AF_INET, socket.SOCK_STREAM, 0),
    "udp": (socket.AF_INET, socket.SOCK_DGRAM, 0),
    "udplite": (socket.AF_INET, socket.SOCK_DGRAM, 136),
    "icmp": (socket.AF_INET, socket.SOCK_DGRAM, 1),
    "raw": (socket.AF_INET, socket.SOCK_RAW, 1),
    "tcp6": (socket.AF_INET6, socket.SOCK_STREAM, 0),
}
for target in targets:
    try:
        with socket.socket(*kinds[sys.argv[1]]) as attacker:
            attacker.settimeout(1)
            if kinds[sys.argv[1]][0] == socket.AF_INET6:
                target = "::1" if target.startswith("127.") else "::ffff:" + target
            if sys.argv[1] == "fastopen":
                attacker.sendto(b"PING\\r\\n", 0x20000000, (target, port))
            elif sys.argv[1] in ("icmp", "raw"):
                attacker.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FF, 0, 0), (target, 0))
            else:
                attacker.connect((target, port))
                attacker.send(b"PING\\r\\n")
            if answer := attacker.recv(64):
                print("reached", target, answer)
    except OSError:
        pass
"""
KINDS = ["tcp", "mptcp", "sctp", "fastopen", "udp", "udplite", "icmp", "raw", "tcp6"]
OWN = [443, 465, 5432]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def own_addresses() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return [probe.getsockname()[0]]
    return []


@pytest.mark.parametrize("kind", KINDS)
async def test_no_service_of_this_machine_can_be_reached(room: Room, redis: RedisServer, kind: str) -> None:
    room.write_script("attack.py", ATTACK)
    targets = ",".join(["127.0.0.1", "127.9.9.9", "0.0.0.0", *own_addresses()])
    script = f"exec /usr/bin/python3 attack.py {kind} {targets} {redis.port}"
    # This holds even for a port that the sandbox may reach elsewhere.
    for connect in ([443], [redis.port]):
        assert (await room.run(script, connect=connect)).ok, room.lines
        assert [line for line in room.lines if not line.startswith("Network: ")] == []
    with redis.client() as client:
        assert client.ping()


PRIVATE = "10.0.0.1 100.100.100.200 169.254.169.254 169.254.170.2 168.63.129.16 172.17.0.1 192.168.1.1 192.0.0.192"


async def test_no_private_address_can_be_reached(room: Room) -> None:
    """Connections are refused at once, so no command waits for an answer."""
    script = """
import socket
for host in "{}".split():
    for port in {}:
        try: socket.create_connection((host, port), 5)
        except PermissionError: continue
        except OSError as error: print(host, port, error)
        else: print("reached", host, port)
"""
    room.write_script("attack.py", script.format(PRIVATE, [*OWN, 80, 6379]))
    assert (await room.run("exec /usr/bin/python3 attack.py", connect=OWN)).ok, room.lines
    assert room.lines == []


OWN_ADDRESS = """
import asyncio, fcntl, os, socket, struct
from gateway.outbound.addresses import BlockedAddress, resolve
from workers.sandbox import network

uid, gid = os.getuid(), os.getgid()
assert network._libc.unshare(network.NEW_USERS | network.NEW_NETWORK) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
    open(f"/proc/self/{name}", "w").write(text)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, network.SET_FLAGS, struct.pack("16sH14x", b"lo", network.UP))
    own = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton("93.184.216.34"))
    fcntl.ioctl(any_socket, 0x8916, struct.pack("16s", b"lo:1") + own)  # SIOCSIFADDR
services = [socket.create_server(("0.0.0.0", port)) for port in (5432, 443)]
ours, theirs = socket.socketpair()
if os.fork() == 0:
    listeners = network.enter_namespace([5432, 443], [])
    socket.send_fds(theirs, [b"x"], [each.fileno() for each in listeners])
    theirs.recv(1)
    for port in (5432, 443):
        try:  # a reset may come before the connection is seen to be made
            with socket.create_connection(("93.184.216.34", port), timeout=5) as connection:
                print(port, connection.recv(100), flush=True)
        except OSError as error:
            print(port, type(error).__name__, flush=True)
    os._exit(0)

theirs.close()

async def main():
    async def greet(reader, writer):
        writer.write(b"the database")
        writer.close()
    for service in services:
        await asyncio.start_server(greet, sock=service)
    listeners = [socket.socket(fileno=fd) for fd in socket.recv_fds(ours, 9, 9)[1]]
    await network.Egress([]).serve(listeners)
    ours.send(b"x")
    await asyncio.to_thread(os.wait)
    for port in (5432, 443):
        try:
            print(port, await resolve("93.184.216.34", port, tenant="acc_1", allow_private=False))
        except BlockedAddress as error:
            print(port, error)

asyncio.run(main())
"""


def test_no_service_of_this_machine_is_reached_at_its_public_address() -> None:
    """A firewall does not see connections of the machine to its own public address."""
    ended = subprocess.run([sys.executable, "-c", OWN_ADDRESS], capture_output=True, text=True, timeout=30, check=False)
    assert ended.stdout.splitlines() == [
        "5432 ConnectionResetError",
        "443 b'the database'",
        "5432 93.184.216.34 is an address of this service.",
        "443 [('93.184.216.34', 443)]",
    ], ended.stderr


async def test_unix_sockets_of_the_machine_cannot_be_reached(room: Room) -> None:
    name = f"capsule-{secrets.token_hex(8)}"
    path = str(room.top / "worker.sock")
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        for server, address in ((named, path), (abstract, f"\0{name}")):
            server.bind(address)
            server.listen()
        os.chmod(path, 0o777)
        for address in (repr(path), f"chr(0) + {name!r}"):
            script = f"import socket; socket.socket(socket.AF_UNIX).connect({address})"
            assert (await room.run(f'exec /usr/bin/python3 -c "{script}"')).code == 1
            assert "refused" in room.lines[-1] or "No such file" in room.lines[-1]


# -- outgoing connections ------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    """A server on this machine that sends its input back when the input has ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    async with await asyncio.start_server(answer, "0.0.0.0", 0) as server:
        yield server.sockets[0].getsockname()[1]


ASK = """
import socket
with socket.create_connection(("127.0.0.1", {}), 10) as one:
    one.sendall(b"x" * 3_000_000)
    one.shutdown(socket.SHUT_WR)
    got = 0
    while part := one.recv(65_536):
        got += len(part)
    print(got)
"""


async def test_an_allowed_connection_carries_all_bytes(room: Room, echo: int) -> None:
    room.write_script("ask.py", ASK.format(echo))
    assert (await room.run("exec /usr/bin/python3 ask.py", connect=[echo], hosts=["127.0.0.1"])).ok, room.lines
    assert room.lines == ["3000000"]


async def test_of_a_burst_as_many_connect_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, connecting, over = list[str](), 0, asyncio.Event()

    async def hang(*_: object) -> None:
        nonlocal connecting
        connecting += 1
        await over.wait()
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", hang)
    egress = network.Egress(["127.0.0.1"], report=reports.append, connections=3)
    async with await asyncio.start_server(egress._accept, "127.0.0.1", 0) as server:
        with contextlib.ExitStack() as burst:
            for _ in range(5):
                burst.enter_context(socket.create_connection(server.sockets[0].getsockname()))
            await wait_until(lambda: connecting == 3 and reports)
        over.set()
        await wait_until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert "there are already 3 connections" in reports[0]


REACH = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.split(":")
    try:
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(b"x")
            connection.shutdown(socket.SHUT_WR)
            print(address, connection.recv(1), flush=True)
    except OSError:
        pass
"""


async def test_an_endpoint_is_reached_by_its_name_and_port_alone(room: Room, echo: int) -> None:
    name = socket.gethostname()
    address = socket.gethostbyname(name)
    async with await asyncio.start_server(lambda *_: None, address, 0) as other:
        closed = other.sockets[0].getsockname()[1]
        room.write_script("reach.py", REACH)
        wanted = [f"{name}:{echo}", f"{name.upper()}:{echo}", f"{name}:{closed}", f"{name}:443", f"{name}:6379"]
        wanted += [f"{own}:{port}" for own in (address, *own_addresses()) for port in (echo, closed)]
        wanted += [f"127.64.0.{last}:{port}" for last in (2, 3) for port in (echo, closed, 443)]
        command = room.command(
            f"exec /usr/bin/python3 reach.py {' '.join(wanted)}",
            SandboxLimits(seconds=60),
            connect=[443, closed],
            endpoints=[(name, echo)],
        )
        assert (await room.sandbox.run(command, room.uid, room.lines.append)).ok, room.lines
    answers = [line for line in room.lines if not line.startswith("Network: ")]
    assert answers == [f"{name}:{echo} b'x'", f"{name.upper()}:{echo} b'x'"]
    assert f"Network: could not connect to {name}:443: this address is not public" in room.lines


async def test_an_endpoint_may_be_an_address(room: Room, echo: int) -> None:
    room.write_script("reach.py", REACH)
    for address in ("127.0.0.1", *own_addresses()):
        script = f"exec /usr/bin/python3 reach.py {address}:{echo} {address}:443 {address}:{echo + 1}"
        command = room.command(script, SandboxLimits(seconds=60), connect=[443], endpoints=[(address, echo)])
        assert (await room.sandbox.run(command, room.uid, room.lines.append)).ok, room.lines
        assert room.lines[0] == f"{address}:{echo} b'x'"
        assert len([line for line in room.lines if not line.startswith("Network: ")]) == 1
        room.lines.clear()


async def test_one_sandbox_does_not_reach_another(room: Room) -> None:
    """Both may use the same port, and neither reaches the other there."""
    listening = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 8080)); print('up', flush=True); time.sleep(9)"
    )
    async with room.sandbox.start(
        room.command(f'exec /usr/bin/python3 -c "{listening}"', SandboxLimits()),
        room.uid,
        room.lines.append,
    ):
        while room.lines != ["up"]:
            await asyncio.sleep(0.02)
        script = "import socket; socket.create_connection(('127.0.0.1', 8080), 2)"
        assert (await room.run(f'exec /usr/bin/python3 -c "{script}"', connect=[443])).code == 1
        assert "refused" in room.lines[-1]


async def test_a_private_name_has_no_address_and_other_records_are_empty(room: Room) -> None:
    script = "import socket; print(socket.gethostbyname('localhost'), flush=True); socket.gethostbyname('{}')"
    name = socket.gethostname()
    assert (await room.run(f'exec /usr/bin/python3 -c "{script.format(name)}"', connect=[443])).code == 1
    assert room.lines[0] == "127.0.0.1"
    assert "gaierror" in room.lines[-1]


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">6H", 0x1234, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1)


def test_dns_questions_are_parsed() -> None:
    asked = query("api.example.com")
    assert network.read_question(asked) == ("api.example.com", len(asked))
    for damaged in (b"", asked[:14], asked[:12] + b"\xff" * 40):
        with pytest.raises((IndexError, UnicodeError)):
            network.read_question(damaged)


@pytest.mark.parametrize(("found", "code", "count"), [(["93.184.216.34"], 0, 1), (["93.184.216.34", "10.0.0.1"], 3, 0)])
async def test_only_public_addresses_of_names_are_returned(
    monkeypatch: pytest.MonkeyPatch, found: list[str], code: int, count: int
) -> None:
    async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in found]

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
    with contextlib.ExitStack() as sockets:
        own = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        client = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        own.bind(("127.0.0.1", 0))
        transport, _ = await loop.create_datagram_endpoint(
            lambda: network.SandboxResolver(network.Egress([]).look_up), sock=own.dup()
        )
        sockets.callback(transport.close)
        client.connect(own.getsockname())
        client.settimeout(5)
        for kind, counted in ((28, 0), (1, count)):
            client.send(query("example.com", kind))
            answer = await asyncio.to_thread(client.recv, 512)
            head = struct.unpack(">6H", answer[:12])
            assert head == (0x1234, 0x8180 | (code if kind == 1 else 0), 1, counted, 0, 0)
        assert answer.endswith(socket.inet_aton(found[0])) == bool(count)
