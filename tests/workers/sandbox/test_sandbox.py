import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.polling import wait_until
from tests.support.sandbox import LANDLOCK, ROOT, Room
from workers.sandbox.sandbox import BUILD_USERS, LINE, Command, Limits, Sandbox, Unsafe


def give_up_capabilities() -> None:
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)


def test_everything_again_without_root() -> None:
    """The same for a worker that is an ordinary user: Landlock alone."""
    if "CAPSULE_AGAIN" in os.environ or not ROOT:
        return
    files = [__file__, str(Path(__file__).with_name("test_keeper.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    if not LANDLOCK:
        command += ["-k", "refused"]
    ended = subprocess.run(
        command,
        env={**os.environ, "CAPSULE_AGAIN": "1"},
        preexec_fn=give_up_capabilities,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout[-8_000:] + ended.stderr[-2_000:]


# -- what can't be reached -----------------------------------------------------------------------------------


async def test_the_worker_and_its_files_are_out_of_reach(each_room: Room) -> None:
    room, worker = each_room, os.getpid()
    (room.top / "sources").mkdir(mode=0o700)
    stored = room.top / "sources" / "other.tar.gz"
    stored.write_text("another's")
    own = room.top / "key"
    own.touch(mode=0o600)
    other = room.top / "builds" / "other" / "work"
    other.parent.mkdir(mode=0o711)
    other.mkdir(mode=0o700)
    (other / "page").write_text("another's")
    for path in (*(f"/proc/{worker}/{name}" for name in ("environ", "mem", "fd/0")), stored, own, other / "page"):
        ended = await room.run(f"exec head -c 1 {path}")
        assert ended.code == 1, (path, room.lines)
        assert room.lines.pop().endswith("Permission denied")
    for folder in (f"/proc/{worker}/cwd/", room.top, other):
        assert (await room.run(f"exec ls {folder}")).code == 2, (folder, room.lines)
    for folder in (room.top, room.build, other, room.top / "sources"):
        assert (await room.run(f": > {folder}/new")).code == 2, (folder, room.lines)
    assert (await room.run(f"kill -0 {worker}")).code == 1
    assert (await room.run("tr '\\0' '\\n' < /proc/$PPID/environ | grep -v -e ^PATH= -e ^LANG= -e ^MARK=")).code == 1


async def test_the_environment_is_what_was_given(room: Room) -> None:
    command = Command(arguments=["env"], folder=room.folder, environment={"PATH": os.environ["PATH"], "ONE": "1"})
    assert (await room.sandbox.run(command, room.uid, room.lines.append)).ok
    assert sorted(line.partition("=")[0] for line in room.lines) == ["ONE", "PATH"]


async def test_nothing_open_is_inherited_and_no_privilege_gained(each_room: Room) -> None:
    assert (await each_room.run("ls /proc/self/fd; grep NoNewPrivs /proc/self/status; echo shown > /dev/stdout")).ok
    assert each_room.lines == ["0", "1", "2", "3", "NoNewPrivs:\t1", "shown"]  # 3 is what `ls` reads


async def test_only_listed_ports_can_be_connected_to(room: Room) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"exec bash -c ': < /dev/tcp/127.0.0.1/{port}'"
        assert (await room.run(script, connect=[port])).ok, room.lines
        if room.sandbox._landlock >= 4:
            assert not (await room.run(script, connect=[443])).ok


# -- users, and machines that can't keep anything in ----------------------------------------------------------


async def test_no_two_builds_have_the_same_user_whoever_runs_them() -> None:
    one, other = (Sandbox(development=False, users=BUILD_USERS[:3]) for _ in range(2))
    with one.reserve_user() as first, other.reserve_user() as second, one.reserve_user() as third:
        users = {first, second, third}
        assert users == {None} or (len(users) == 3 and users <= set(BUILD_USERS[:3]))
        if first is not None:
            with pytest.raises(OSError, match="taken"), other.reserve_user():
                pass
    with other.reserve_user() as again:
        assert again == first


def test_a_machine_without_any_means_is_refused_but_for_development(tmp_path: Path) -> None:
    for development in (False, True):
        sandbox = Sandbox(development=development, users=BUILD_USERS)
        sandbox._root, sandbox._landlock, sandbox._half_root = False, 0, False
        if development:
            sandbox.check(tmp_path)
        else:
            with pytest.raises(Unsafe, match="as root, or on Linux"):
                sandbox.check(tmp_path)


def test_some_capabilities_are_refused(tmp_path: Path) -> None:
    sandbox = Sandbox(development=True, users=BUILD_USERS)
    sandbox._root, sandbox._half_root = False, True
    with pytest.raises(Unsafe, match="or none"):
        sandbox.check(tmp_path)


def test_a_folder_that_builds_can_not_pass_or_may_read_is_refused(tmp_path: Path) -> None:
    sandbox = Sandbox(development=False, users=BUILD_USERS)
    sandbox._root, sandbox._landlock, sandbox._half_root = True, 6, False
    tmp_path.chmod(0o700)
    with pytest.raises(Unsafe, match="chmod o"):
        sandbox.check(tmp_path)
    sandbox._development = True
    sandbox.check(tmp_path)  # by Landlock exclusive_lock, then
    assert not sandbox._root
    with pytest.raises(Unsafe, match="/usr"):
        sandbox.check(Path("/usr/share"))


# -- output --------------------------------------------------------------------------------------------------


async def test_output_comes_as_it_is_written(room: Room) -> None:
    command = room.command("echo first; sleep $MARK", Limits())
    async with room.sandbox.start(command, room.uid, room.lines.append):
        await wait_until(lambda: room.lines == ["first"])
    assert room.alive() == []


async def test_lines_are_told_whole_and_long_ones_broken(room: Room) -> None:
    script = "printf 'a\\r\\n\\nb\\342\\202'; sleep 0.1; printf '\\254\\n\\377\\n'; head -c 9000 /dev/zero | tr '\\0' x"
    assert (await room.run(script)).ok
    assert room.lines == ["a", "", "b€", "�", "x" * LINE, "x" * LINE, "x" * (9000 - 2 * LINE)]


async def test_output_without_end_leaves_others_their_turn(room: Room) -> None:
    late, before = 0.0, time.monotonic()
    running = asyncio.create_task(room.run("yes", seconds=1))
    while not running.done():
        await asyncio.sleep(0.01)
        late, before = max(late, time.monotonic() - before), time.monotonic()
    assert (await running).why == "time"
    assert len(room.lines) > 10_000
    assert late < 0.3


async def test_what_can_not_be_started_leaves_nothing_open(room: Room) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="too long"):
        await room.run("x" * 200_000)
    assert len(os.listdir("/proc/self/fd")) == descriptors
