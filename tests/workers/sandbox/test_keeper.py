"""The bounds and the end of a command, and control groups of version 2 by the files that the kernel would read."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.background import cancel
from tests.support.polling import wait_until
from tests.support.sandbox import WAYS, Room, marked
from workers.sandbox import cgroups
from workers.sandbox.cgroups import Cgroup, read_available_memory
from workers.sandbox.keeper import DataFolder, find_real_path
from workers.sandbox.sandbox import COPIES, MIB, Outcome, SandboxLimits

# -- limits --------------------------------------------------------------------------------------------------

FILL = "i=0; while :; do i=$((i+1)); head -c 1M /dev/zero > $i; done"


@pytest.mark.parametrize(
    ("script", "limits", "message"),
    [
        ("sleep $MARK", SandboxLimits(seconds=0.4), "it took longer than 0 seconds"),
        (
            "head -c 300M /dev/zero | tail",
            SandboxLimits(memory=100 * MIB),
            "it ran out of memory; its limit is 100 MiB",
        ),
        (FILL, SandboxLimits(disk=20 * MIB), "it wrote more than 20 MiB"),
        ("head -c 30M /dev/zero > fast", SandboxLimits(disk=20 * MIB), "it wrote more than 20 MiB"),
        ("while :; do sleep $MARK & done", SandboxLimits(processes=40), "it started more than 40 processes"),
        (
            "sleep $MARK",
            SandboxLimits(disk=100 * MIB, free=1 << 60),
            "it was stopped because the machine's disk is almost full; try again later",
        ),
        (
            "for n in 1 2 3 4; do mkdir $n; (cd $n; seq 1000 | xargs touch); done; sleep $MARK",
            SandboxLimits(disk=1_024 * MIB, inodes=3_000),
            "it created more than 3,000 files",
        ),
    ],
)
async def test_a_limit_ends_the_command(each_room: Room, script: str, limits: SandboxLimits, message: str) -> None:
    room = each_room
    ended = await room.sandbox.run(room.command(script, limits), room.uid, room.lines.append)
    if "&" in script and not room.sandbox._cgroups:  # it may fail by itself before it is measured
        assert not ended.ok
    else:
        assert ended.describe("it", limits) == message
    assert room.alive() == []


# `T` runs a function in a second thread and ends the first one, which then shows no descriptors.
ORPHANED = (
    "import threading; T = lambda f: (threading.Thread(target=f).start(),"
    " ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0));"
)
MEMORY_ATTACKS = {
    "memfd": "fd = os.memfd_create('x'); [os.write(fd, bytes(1 << 20)) for _ in range(400)]",
    "shared": "m = mmap.mmap(-1, 400 << 20); [m.write(bytes(1 << 20)) for _ in range(400)]",
    "shm": "f = open('/dev/shm/x', 'wb'); [f.write(bytes(1 << 20)) for _ in range(400)]",
    "children": "[m.write(bytes(1 << 20)) for _ in range(8) if os.fork() == 0 for m in [mmap.mmap(-1, 50 << 20)]"
    " for _ in range(50)]",
    "orphaned": f"{ORPHANED} T(lambda: [time.sleep(1), bytearray(b'x') * (400 << 20), time.sleep(20)])",
    "named": "[open(f'/tmp/{n}', 'wb').write(bytes(1 << 20)) for n in range(45)]; f = open('/var/tmp/x', 'wb');"
    " [f.write(bytes(1 << 20)) for n in range(45)]; f = open('/dev/shm/x', 'wb');"
    " [f.write(bytes(1 << 20)) for n in range(45)]",
    "sysv": "c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p;"
    " ctypes.memset(c.shmat(c.shmget(0, ctypes.c_size_t(400 << 20), 0o1600), None, 0), 1, 400 << 20)",
}


@pytest.mark.parametrize("attack", MEMORY_ATTACKS)
async def test_no_kind_of_memory_escapes_the_limit(each_room: Room, attack: str) -> None:
    script = f'exec /usr/bin/python3 -c "import ctypes, mmap, os, time; {MEMORY_ATTACKS[attack]}; time.sleep(20)"'
    outcome = await each_room.run(script, memory=100 * MIB, seconds=15)
    if attack == "shm" and not outcome.why:
        assert "No space left" in each_room.lines[-1]  # at half of the limit
    else:
        assert outcome.why == "memory"
    assert each_room.alive() == []
    assert "1600 " not in Path("/proc/sysvipc/shm").read_text(), "nothing outlives it"


DISK_ATTACKS = {
    "unlinked": "f = open('x', 'wb'); os.unlink('x'); [f.write(bytes(1 << 20)) for _ in range(150)]; f.flush()",
    "mapped": "f = open('x', 'w+b'); f.truncate(150 << 20); m = mmap.mmap(f.fileno(), 0); f.close(); os.unlink('x');"
    " [m.write(bytes(1 << 20)) for _ in range(150)]",
    "orphaned": f"{ORPHANED} T(lambda: [f.write(bytes(1 << 20)) for f in [open('x', 'wb')] for _ in [os.unlink('x')]"
    " for n in range(480) if time.sleep(0.02) is None] and time.sleep(20))",
    "in sockets": "import socket; a, b = socket.socketpair()\nfor n in range(48):\n f = open('x', 'wb');"
    " os.unlink('x'); f.write(bytes(10 << 20)); f.flush(); socket.send_fds(a, [b'x'], [f.fileno()]); f.close();"
    " time.sleep(0.02)\npass",
    "many": "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(150)]",
}


@pytest.mark.parametrize("attack", DISK_ATTACKS)
async def test_no_file_escapes_the_limit(each_room: Room, attack: str) -> None:
    script = f'exec /usr/bin/python3 -c "import ctypes, mmap, os, time; {DISK_ATTACKS[attack]}; time.sleep(20)"'
    outcome = await each_room.run(script, memory=1_024 * MIB, disk=100 * MIB, seconds=15)
    assert outcome.why == "disk", each_room.lines


def test_data_are_measured_at_once_when_the_disk_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=MIB))
    (tmp_path / "files").mkdir()
    (tmp_path / "limit").write_text(str(2 * MIB))
    folder = DataFolder(str(tmp_path))
    monkeypatch.setattr(time, "monotonic", lambda: 1_000.0)
    assert not folder.is_full()
    (tmp_path / "files" / "big").write_bytes(bytes(3 * MIB))
    monkeypatch.setattr(time, "monotonic", lambda: 1_000.1)
    free -= 1
    assert not folder.is_full(), "it is not measured yet"
    free -= 2
    assert folder.is_full()


async def test_a_flood_of_processes_is_killed_at_once(each_room: Room) -> None:
    script = "trap '' TERM; bomb() { setsid sleep $MARK & bomb & bomb; }; bomb; sleep $MARK"
    outcome = await each_room.run(script, processes=100, seconds=10)
    assert outcome.why == "processes" or not each_room.sandbox._cgroups
    assert each_room.alive() == []


async def test_the_processor_is_bounded(room: Room) -> None:
    if WAYS == ["measured"]:
        return  # an ordinary user without control groups
    spin = "timeout 0.5 sh -c 'while :; do :; done' & "
    assert (await room.run(f"{spin * 4} wait; awk '{{print $16 + $17}}' /proc/$$/stat", cpus=0.5)).ok
    assert int(room.lines[-1]) < 65, "four loops of half a second, in hundredths"


async def test_the_processor_of_its_keeper_is_bounded(room: Room) -> None:
    """The keeper's own work, such as look-ups and output, is bounded too."""
    if WAYS == ["measured"]:
        return
    running = asyncio.create_task(room.run("echo there; sleep $MARK"))
    await wait_until(lambda: room.lines == ["there"], 20)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    groups = [Path(f"/proc/{pid}/cgroup").read_text() for pid in children]
    await cancel(running)
    assert any(f"capsule-{pid}-keeper\n" in group for pid, group in zip(children, groups, strict=True))


# -- the end of a command ------------------------------------------------------------------------------------

LEFT_BEHIND = "sleep $MARK & setsid sleep $MARK & (setsid sh -c '(sleep $MARK &) ; sleep $MARK' &) ; sleep 0.1; "


async def test_processes_that_the_command_leaves_behind_are_killed(each_room: Room) -> None:
    began = time.monotonic()
    assert await each_room.run(f"{LEFT_BEHIND} echo done; exit 3") == Outcome(3)
    assert each_room.lines == ["done"]
    assert each_room.alive() == []
    assert time.monotonic() - began < 10


async def test_a_canceled_run_returns_after_its_processes_are_dead(each_room: Room) -> None:
    running = asyncio.create_task(each_room.run(f"trap '' TERM; {LEFT_BEHIND} echo there; sleep $MARK"))
    await wait_until(lambda: each_room.lines == ["there"], 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert each_room.alive() == []


async def test_a_run_canceled_at_any_moment_leaves_nothing_behind(room: Room) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for delay in (0, 0.01, 0.03, 0.05, 0.08):
        running = asyncio.create_task(room.run("sleep $MARK"))
        await asyncio.sleep(delay)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await wait_until(lambda: room.alive() == [])  # the kernel may still be ending a killed process
    await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


async def test_a_stop_allows_a_grace_period(room: Room) -> None:
    script = "trap 'echo stopping; exit 4' TERM; echo ready; while :; do sleep 0.05; done"
    async with room.sandbox.start(room.command(script, SandboxLimits(grace=5)), room.uid, room.lines.append) as ending:
        await wait_until(lambda: room.lines == ["ready"])
    assert ending.result() == Outcome(4, "stopped")
    assert room.lines[-1] == "stopping"


@pytest.mark.parametrize("victim", ["worker", "keeper"])
async def test_the_command_dies_with_its_worker_and_with_its_keeper(room: Room, victim: str) -> None:
    """Even SIGKILL, which neither can handle, leaves no command running."""
    (room.build / COPIES).symlink_to((room.top / COPIES).resolve())
    script = textwrap.dedent(f"""
        import asyncio, os
        from pathlib import Path
        from workers.sandbox.sandbox import *
        sandbox = Sandbox(development=True, users=BUILD_USERS)
        async def main():
            sandbox.check(Path({str(room.build)!r}))
            with sandbox.reserve_user() as uid:
                folder = Path({str(room.build)!r}, "another")
                folder.mkdir()
                sandbox.give_to_user(folder, uid)
                command = Command(arguments=["sh", "-c", "echo ready; exec sleep {room.mark}"], folder=folder,
                    environment=sandbox.environment, write=[folder])
                await sandbox.run(command, uid, lambda line: print(os.getpid(), line, flush=True))
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as output:
        while output.readline().split() != [str(process.pid), "ready"]:  # a warning may precede it
            assert process.poll() is None
        assert await wait_until(lambda: f"sleep {room.mark} " in marked(room.mark))
        if victim == "worker":
            process.kill()
        else:
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        await wait_until(lambda: f"sleep {room.mark} " not in marked(room.mark), 5)
        process.kill()


def test_without_a_sandbox_the_paths_of_a_command_are_the_machines() -> None:
    """Tools and other files of the machine may be below /tmp, or below a folder of the name that a command sees."""
    spec: Any = {"places": {"/srv/x/app": "/app", "/srv/x/home": "/home/app", "/srv/x/tmp": "/tmp"}}
    for text, real in {
        "/app": "/srv/x/app",
        "/home/app/.cache/npm": "/srv/x/home/.cache/npm",
        "/tmp": "/srv/x/tmp",
        "/tmp/node/bin:/usr/bin": "/tmp/node/bin:/usr/bin",
        "/application": "/application",
        "https://example.com/app": "https://example.com/app",
    }.items():
        assert find_real_path(spec, text) == real


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids cpu")
    return tmp_path


def test_one_group_bounds_everything_and_those_of_killed_keepers_are_removed(parent: Path) -> None:
    alive = f"capsule-{os.getppid()}"
    for former in ("capsule-4999999", "capsule-4999999-keeper", alive):
        (parent / former).mkdir()
    group = Cgroup([str(parent)], memory=1 << 20, processes=7, cpus=0.5)
    folder = parent / f"capsule-{os.getpid()}"
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert {path.name for path in parent.glob("capsule-*")} == {alive, folder.name}
    cgroups.enter_keepers_group([str(parent)])
    assert (parent / f"{folder.name}-keeper" / "cpu.max").read_text() == "50000 100000"
    limits = {"memory.max": "1048576", "memory.swap.max": "0", "pids.max": "7", "cpu.max": "50000 100000"}
    assert written == limits
    group.attach(41)
    assert group.list_processes() == [41]
    for memory, pids, expected in ((0, 0, ""), (0, 2, "processes"), (1, 2, "memory")):
        (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {memory}\n")
        (folder / "pids.events").write_text(f"max {pids}\n")
        assert group.find_exceeded() == expected


def test_processes_move_out_of_a_group_that_bounds_others(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees its own group as the root."""
    control = parent / "cgroup.subtree_control"
    control.write_text("")
    (parent / "cgroup.procs").write_text("1\n23\n")
    moved: list[str] = []
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        if path == control and not moved:
            raise OSError(16, "Device or resource busy")
        if path.name == "cgroup.procs":
            moved.append(text)
        return write_text(path, text)

    monkeypatch.setattr(Path, "write_text", write)
    assert cgroups._prepare(parent)
    assert moved == ["1", "23"]
    assert control.read_text() == "+memory +pids +cpu"


def test_available_memory(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = parent / "meminfo"
    monkeypatch.setattr(cgroups, "MEMORY_INFO", info)
    assert read_available_memory() > 1 << 60, "a system without this file has no known limit"
    info.write_text("MemTotal:  8000 kB\nMemAvailable:   5000 kB\n")
    assert read_available_memory() == 5_000 * 1_024
    (parent / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    (parent / "memory.current").write_text("5000\n")
    (parent / "memory.max").write_text("max\n")
    assert read_available_memory() == 5_000 * 1_024
    (parent / "memory.max").write_text("6000\n")
    assert read_available_memory() == 2_000
