"""The network of a sandbox: a namespace with only a loopback device, and a keeper that checks outgoing connections.

In the namespace every public IPv4 address is local, and all other addresses are prohibited. A connection to
93.184.216.34:443 therefore reaches a listener in the namespace, which the keeper holds open from outside. The local
address of the accepted connection is the address that the command wanted. The keeper checks it and connects to it.
Listeners exist for the ports that the sandbox may reach, and for DNS at 127.0.0.1:53. There is no other way out: no
device, no route, no forwarding. Unlike a proxy, this needs no settings in tools.

A sandbox may also reach endpoints: hosts, each with a port, whatever their addresses are. In the namespace, the name of
such a host has a loopback address of its own, and the keeper connects to the name. So the sandbox reaches no other port
of the host, and no other name leads to the host's address.

In the other direction, a relay leads into the namespace (`relay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import ipaddress
import math
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

from gateway.cancellation import RunningTasks, cancel
from gateway.outbound.public import NOT_PUBLIC, is_own_service, is_public

NEW_USERS, NEW_NETWORK = 0x1000_0000, 0x4000_0000
PARENT_DIED, DUMPABLE, SUBREAPER = 1, 4, 36  # prctl
# Constants of rtnetlink(7) and netdevice(7), because `ip` may not be installed.
SET_FLAGS, UP = 0x8914, 0x1  # of an interface
NEW_ROUTE, REQUEST_CREATE_ACKNOWLEDGE = 24, 0x1 | 0x400 | 0x4
LOCAL, PROHIBIT = 2, 8  # route types
LOCAL_TABLE, BOOT, HOST = 255, 3, 254  # table, protocol and scope of a route
DESTINATION, DEVICE = 1, 4  # attributes of a route
CONNECTIONS, LOOKUPS = 512, 32  # at a time, per sandbox
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 10.0  # that a build waits for the first byte from a host, which in TLS follows soon
OUTAGE_SECONDS = 30.0  # that connections of a build to such a host fail at once
GIVE_UP_SECONDS = 25.0  # after which a build without its registry ends
CHECK_SECONDS = 1.0  # between checks whether that byte is late
RACE_SECONDS = 0.25  # that one address of an endpoint has before the next one is tried too
CHUNK_BYTES = 65_536
LAST_CHUNKS = 16  # of an answer that are read after its connection was reset
DROPPED_BYTES, DROP_SECONDS = 64 << 20, 30.0  # of a request that was answered before it was read
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection
NO_SUCH_NAME, SERVER_FAILURE = 3, 2
TTL_SECONDS = 30
MAX_NAMES = 1_000  # of hosts that are remembered, in each table
MAX_REPORTS = 20

Endpoint = tuple[str, int]  # a lower-case name or an IPv4 address, and a port

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Lets the kernel send this process a signal when its parent ends. Ends it at once if the parent has ended already.

    `parent` is the parent's process id, as it was before the fork.
    """
    prctl(PARENT_DIED, number)
    if os.getppid() != parent:
        os._exit(126)


def prctl(option: int, value: int) -> None:
    """Calls prctl(2). Does nothing on systems other than Linux. Raises OSError."""
    if (
        sys.platform == "linux"
        and _libc.prctl(ctypes.c_int(option), *[ctypes.c_ulong(number) for number in (value, 0, 0, 0)]) != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


def assign_addresses(endpoints: Iterable[Endpoint]) -> dict[str, str]:
    """Returns the address that each host has in the namespace: its own, or one of loopback for a name."""
    addresses = dict[str, str]()
    for host, _ in endpoints:
        try:
            addresses[host] = str(ipaddress.IPv4Address(host))
        except ValueError:
            addresses[host] = "127.0.0.1" if host == "localhost" else f"127.64.0.{len(addresses) + 1}"
    return addresses


def enter_namespace(
    ports: Sequence[int], hosts: Sequence[str], endpoints: Sequence[Endpoint] = ()
) -> list[socket.socket]:
    """Moves this process into a new user namespace and a new network namespace.

    `hosts`: addresses that may be reached although they are not public. Returns the listeners for outgoing connections.
    Raises OSError.
    """
    uid, gid = os.getuid(), os.getgid()
    prctl(DUMPABLE, 1)  # otherwise /proc/self belongs to root after a change of user
    if _libc.unshare(NEW_USERS | NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses to create namespaces for this user")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    addresses = assign_addresses(endpoints)
    _route([*hosts, *addresses.values()])
    listening = [("0.0.0.0", port) for port in ports]  # noqa: S104
    listening += {(addresses[host], port) for host, port in endpoints if port not in ports}
    listeners = [socket.create_server(address, backlog=CONNECTIONS) for address in listening]
    if listeners:
        listeners.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        listeners[-1].bind(("127.0.0.1", 53))
    return listeners


def _route(hosts: Sequence[str]) -> None:
    """Makes all public IPv4 addresses local, and prohibit the others. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP))
    closed = [block for block in NOT_PUBLIC if block.version == 4 and not block.is_loopback]
    opened = [ipaddress.ip_network(host) for host in hosts if not ipaddress.ip_address(host).is_loopback]
    routes = [(LOCAL, ipaddress.ip_network("0.0.0.0/0")), *((PROHIBIT, block) for block in closed)]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(10)
        for kind, block in [*routes, *((LOCAL, block) for block in opened)]:
            # All routes are in the table that the kernel reads first. There, the longest prefix wins.
            route = struct.pack("8BI", socket.AF_INET, block.prefixlen, 0, 0, LOCAL_TABLE, BOOT, HOST, kind, 0)
            route += struct.pack("2H4s", 8, DESTINATION, block.network_address.packed)
            if kind == LOCAL:
                route += struct.pack("2HI", 8, DEVICE, socket.if_nametoindex("lo"))
            kernel.send(struct.pack("I2H2I", 16 + len(route), NEW_ROUTE, REQUEST_CREATE_ACKNOWLEDGE, 0, 0) + route)
            if code := struct.unpack_from("i", kernel.recv(4_096), 16)[0]:
                raise OSError(-code, f"no route for {block}: {os.strerror(-code)}")


class Egress:
    """Makes the outgoing connections of one sandbox. The keeper runs it in its own namespace."""

    def __init__(
        self,
        hosts: Sequence[str],
        endpoints: Iterable[Endpoint] = (),
        report: Callable[[str], None] = lambda line: None,
        answer_seconds: float = math.inf,
        *,
        connections: int = CONNECTIONS,
    ) -> None:
        """`report` gets a line for each name and each host that can't be reached.

        A connection ends if its first bytes get no answer within `answer_seconds`.
        """
        self._hosts = {ipaddress.ip_address(host) for host in hosts}
        self._addresses = assign_addresses(endpoints)
        self._endpoints = {(self._addresses[host], port): host for host, port in endpoints}
        self._names = {address: name for name, address in self._addresses.items()}
        self._report, self._reported = report, set[str]()
        self._answer_seconds, self._outages = answer_seconds, Outages()
        self._connections = RunningTasks()
        self._max_connections = connections

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        for listener in listeners:
            if listener.type == socket.SOCK_DGRAM:
                await asyncio.get_running_loop().create_datagram_endpoint(
                    lambda: SandboxResolver(self.look_up), sock=listener
                )
            else:
                await asyncio.start_server(self._accept, sock=listener)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_full = len(self._connections) >= self._max_connections
        # As a coroutine, it would make Python 3.11 log a traceback for each connection that the sandbox's end cancels.
        self._connections.start(self._connect(reader, writer, is_full))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_full: bool) -> None:
        host, port = writer.get_extra_info("sockname")
        began = asyncio.get_running_loop().time()
        try:
            if is_full:
                raise OSError(f"there are already {self._max_connections} connections")
            self._outages.check((host, port))
            outer = await self._open_connection(host, port)
            on_answer = partial(self._outages.note_answer, (host, port))
            await splice((reader, writer), outer, answer_seconds=self._answer_seconds, on_answer=on_answer)
        except OSError as error:
            if self._answer_seconds < math.inf:
                self._outages.note_failure((host, port), began, error)
            self._report_once(f"could not connect to {self._names.get(host, host)}:{port}: {_explain(error)}")
            abort(writer)

    async def _open_connection(self, host: str, port: int) -> Connection:
        """Connects to what the address in the namespace stands for. Raises OSError."""
        address, name = ipaddress.ip_address(host), self._endpoints.get((host, port))
        async with asyncio.timeout(CONNECT_SECONDS):
            if name is not None:
                return await asyncio.open_connection(name, port, happy_eyeballs_delay=RACE_SECONDS)
            if address not in self._hosts and (not is_public(address) or is_own_service(host, port)):
                raise OSError("this address is not public")
            return await asyncio.open_connection(host, port)

    @property
    def has_lost_endpoint(self) -> bool:
        """Returns whether an endpoint has been out of reach for long, and the command has kept trying."""
        return any(self._outages.measure(endpoint) > GIVE_UP_SECONDS for endpoint in self._endpoints)

    async def look_up(self, name: str) -> tuple[int, list[str]]:
        """Returns the response code and the addresses of the name."""
        if address := self._addresses.get(name.lower()):
            return 0, [address]
        code, found = await _look_up(name)
        if code:
            missing = "has no public address" if code == NO_SUCH_NAME else "can't be looked up"
            self._report_once(f"the name {name} {missing}")
        elif len(self._names) < MAX_NAMES:
            self._names |= dict.fromkeys(found, name)
        return code, found

    def _report_once(self, line: str) -> None:
        if line not in self._reported and len(self._reported) < MAX_REPORTS:
            self._reported.add(line)
            self._report(f"Network: {line}")


class Outage(TimeoutError):
    """A host did not answer a short while ago."""


class Outages:
    """Hosts that do not answer a build.

    Package managers try each of hundreds of packages several times. Only the first connections wait for the host.
    """

    def __init__(self) -> None:
        self._answered_at, self._ends = dict[Endpoint, float](), dict[Endpoint, float]()
        self._failures = dict[
            Endpoint, tuple[float, float]
        ]()  # the times of the first one since an answer, and the last

    def check(self, endpoint: Endpoint) -> None:
        """Raises Outage."""
        if self._ends.get(endpoint, 0) > asyncio.get_running_loop().time():
            raise Outage

    def note_answer(self, endpoint: Endpoint) -> None:
        if endpoint in self._answered_at or len(self._answered_at) < MAX_NAMES:
            self._answered_at[endpoint] = asyncio.get_running_loop().time()
        self._failures.pop(endpoint, None)

    def note_failure(self, endpoint: Endpoint, began: float, error: OSError) -> None:
        """Notes that a connection failed. No answer is no outage if another connection got one since this one began."""
        now = asyncio.get_running_loop().time()
        if self._answered_at.get(endpoint, 0) > began or len(self._failures) >= MAX_NAMES:
            return
        first, last = self._failures.get(endpoint, (now, now))
        self._failures[endpoint] = first if now - last < OUTAGE_SECONDS else now, now
        if isinstance(error, TimeoutError) and not isinstance(error, Outage):
            self._ends[endpoint] = now + OUTAGE_SECONDS

    def measure(self, endpoint: Endpoint) -> float:
        """Returns for how many seconds all connections to the endpoint have failed."""
        first, last = self._failures.get(endpoint, (0, 0))
        return last - first


def _explain(error: OSError) -> str:
    match error:
        case TimeoutError():
            return "it does not answer"
        case ConnectionRefusedError():
            return "it refused the connection"
        case socket.gaierror():
            return "its name can't be looked up"
    return os.strerror(error.errno) if error.errno else str(error)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LastWords(asyncio.StreamReaderProtocol):
    """Reads what the other side sent before it closed the connection, even if it did not read all that it got.

    The kernel resets such a connection, and asyncio would drop what has arrived. The reader finds an end, not an error.
    """

    _socket: int  # descriptor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket").fileno()

    def connection_lost(self, error: Exception | None) -> None:
        for _ in range(LAST_CHUNKS if isinstance(error, ConnectionError) else 0):
            try:
                data = os.read(self._socket, CHUNK_BYTES)
            except OSError:
                data = b""
            if not data:
                error = None
                break
            self.data_received(data)
        super().connection_lost(error)


async def connect_to_server(host: str, port: int) -> Connection:
    """Connects to a server that may answer before it has read the whole request. Raises OSError."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    transport, protocol = await loop.create_connection(lambda: LastWords(reader, loop=loop), host, port)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class NoAnswer(TimeoutError):
    """The other side of a connection has sent nothing."""


async def splice(
    one: Connection,
    other: Connection,
    idle_seconds: float = math.inf,
    answer_seconds: float = math.inf,
    on_answer: Callable[[], None] = lambda: None,
    end_seconds: float = math.inf,
    filter_answer: Callable[[bytes], bytes] = bytes,
) -> None:
    """Copies bytes in both directions until both have ended.

    `filter_answer` changes what `other` sends, or raises OSError. If `other` has closed its connection before `one` has
    sent all (`LastWords`), the rest is dropped: `one` may read the answer only afterwards, or not at all if it cannot
    send.

    Aborts both connections if one side aborts its own, if nothing has moved for `idle_seconds`, or if `other` has not
    ended `end_seconds` after `one`. Raises NoAnswer if `other` sends nothing within `answer_seconds` of the first bytes
    of `one`; calls `on_answer` for all that it sends.
    """
    loop = asyncio.get_running_loop()
    moved_at, answer_ends, ends = loop.time(), math.inf, math.inf

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal moved_at, answer_ends, answer_seconds
        while data := await reader.read(CHUNK_BYTES):
            moved_at = loop.time()
            if reader is other[0]:
                answer_ends = answer_seconds = math.inf
                on_answer()
                data = filter_answer(data)
            answer_ends = min(answer_ends, moved_at + answer_seconds)
            writer.write(data)
            await writer.drain()
            moved_at = loop.time()
        writer.write_eof()

    async def carry_request() -> None:
        try:
            return await carry(one[0], other[1])
        except OSError:
            if not other[1].is_closing():
                raise
        await drop_rest(one[0], DROP_SECONDS)

    directions = [asyncio.create_task(carry_request()), asyncio.create_task(carry(other[0], one[1]))]
    try:
        pending: Iterable[asyncio.Task[None]] = directions
        while pending:
            if loop.time() > answer_ends:
                raise NoAnswer
            left = min(moved_at + idle_seconds, ends) - loop.time()
            if left < 0:
                raise TimeoutError
            left = left if answer_seconds == math.inf else min(left, CHECK_SECONDS)
            done, pending = await asyncio.wait(
                pending, timeout=None if left == math.inf else left, return_when=asyncio.FIRST_COMPLETED
            )
            for direction in done:
                direction.result()
            if directions[0] in done and not other[1].is_closing():
                ends = loop.time() + end_seconds
    except (OSError, RuntimeError) as error:  # RuntimeError: the other direction has just closed the connection
        abort(one[1])
        abort(other[1])
        if isinstance(error, NoAnswer):
            raise
    finally:
        await cancel(*directions)
        one[1].close()
        other[1].close()


async def drop_rest(reader: asyncio.StreamReader, seconds: float) -> None:
    """Reads the rest of a request that has its answer. To close the connection before would take the answer with it.

    Ends when the visitor does, and within bounds. Raises OSError.
    """
    left = DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while left > 0 and (data := await reader.read(CHUNK_BYTES)):
                left -= len(data)


def abort(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    writer.transport.abort()


class SandboxResolver(asyncio.DatagramProtocol):
    """A DNS server that returns IPv4 addresses, and no records of other types."""

    def __init__(self, look_up: Callable[[str], Awaitable[tuple[int, list[str]]]]) -> None:
        """`look_up` returns the response code and the addresses of a name."""
        self._look_up = look_up
        self._pending = RunningTasks()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, query: bytes, sender: tuple[str, int]) -> None:
        if len(self._pending) < LOOKUPS:  # a client whose query is dropped sends it again
            self._pending.start(self._answer(query, sender))

    async def _answer(self, query: bytes, sender: tuple[str, int]) -> None:
        try:
            name, end = read_question(query)
        except (IndexError, UnicodeError):
            return
        code, found = 0, list[str]()
        if query[end - 4 : end] == b"\0\1\0\1":  # A, IN
            code, found = await self._look_up(name)
        head = query[:2] + struct.pack(">5H", 0x8180 | code, 1, len(found), 0, 0)
        record = struct.pack(">3HIH", 0xC00C, 1, 1, TTL_SECONDS, 4)  # 0xC00C refers to the name at offset 12
        answers = b"".join(record + socket.inet_aton(address) for address in found)
        self._transport.sendto(head + query[12:end] + answers, sender)  # type: ignore[attr-defined]


def read_question(query: bytes) -> tuple[str, int]:
    """Returns the name, and the offset of the question's end. Raises IndexError or UnicodeError."""
    labels, at = list[str](), 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels), at + 5


async def _look_up(name: str) -> tuple[int, list[str]]:
    """Returns the response code and the addresses of the name, if all of them are public."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            f"{name}.", None, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    except socket.gaierror as error:
        missing = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return NO_SUCH_NAME if missing else SERVER_FAILURE, []
    except (OSError, UnicodeError):
        return SERVER_FAILURE, []
    found = list(dict.fromkeys(str(info[4][0]) for info in infos))
    if not all(is_public(ipaddress.ip_address(address)) for address in found):
        return NO_SUCH_NAME, []
    return 0, found[:8]
