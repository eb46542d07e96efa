import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.ids import new_id
from tests.support.folders import passable_folder
from tests.support.polling import wait_until
from tests.support.programs import require
from tests.support.sandbox import ROOT, Room, delegation, repeat_without_root, room_of
from tests.support.user_namespace import FAULT, enter_user_namespace
from workers.sandbox import bwrap, cgroups, tools
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import BUILD_USERS, Command, Sandbox, SandboxLimits

# Selects the tests that control groups influence. The others are the same with and without them.
GROUPED = "not measured and (control or processor or canceled or stop or dies)"


@pytest.mark.timeout(360)
@pytest.mark.parametrize("delegated", [True, False], ids=["with control groups", "measured"])
def test_everything_again_without_root(delegated: bool) -> None:
    """The sandbox also isolates a worker that is an ordinary user, with and without delegated control groups."""
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in ("keeper", "network"))]
    if delegated and ROOT:
        with delegation() as enter:
            repeat_without_root(*files, "-k", GROUPED, enter=enter)
    else:
        repeat_without_root(*files)


# -- isolation -----------------------------------------------------------------------------------------------


async def test_the_worker_and_its_files_are_out_of_reach(each_room: Room) -> None:
    room, worker = each_room, os.getpid()
    stored = room.top / "sources" / "other.tar.gz"
    other = room.top / "builds" / "other" / "work" / "page"
    for path in (stored, other):  # readable by everyone: file modes must not be the protection
        path.parent.mkdir(parents=True)
        path.write_text("another's")
    for path in (
        f"/proc/{worker}/environ",
        f"/proc/{worker}/cwd",
        stored,
        other,
        "/etc/shadow",
        "/root",
        "/sys",
        "/run",
    ):
        assert not (await room.run(f"ls -d {path}")).ok, (path, room.lines)
    for folder in ("/", "/usr", "/dev", "/etc"):
        assert (await room.run(f": > {folder}/new")).code == 2, (folder, room.lines)
    for folder in (room.top, room.build):  # a write may succeed in the sandbox's temporary file system
        await room.run(f": > {folder}/new")
        assert not (folder / "new").exists()
    assert (await room.run("ls /proc | grep -c '^[0-9]'; ls /tmp")).ok
    assert int(room.lines[-2]) < 6, "only its own processes"
    assert room.lines[-1] == room.top.relative_to("/tmp").parts[0], "only the way to its own folder"


LIMITS_OF_OTHERS = """
import ctypes, os, resource
for pid in range(1, 40_000):
    for attack in (
        lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
        lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.kill(pid, 9),
    ):
        if pid > 20:
            try: attack()
            except OSError: continue
            print("reached", pid)
"""


async def test_other_processes_are_out_of_reach(each_room: Room) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getscheduler(0)
    victim = subprocess.Popen(["sleep", "30"], preexec_fn=None if each_room.uid is None else become(each_room.uid))
    try:
        assert (await each_room.run(f"exec /usr/bin/python3 -c '{LIMITS_OF_OTHERS}'")).ok, each_room.lines
        assert each_room.lines == []
        assert victim.poll() is None
        assert (resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getscheduler(0)) == before
    finally:
        victim.kill()
        victim.wait()


async def test_bubblewraps_own_process_is_out_of_reach(room: Room) -> None:
    """Otherwise, the command could make it outlive its keeper, and with it all its processes."""
    seize = "import ctypes, os; print(ctypes.CDLL(None).ptrace(0x4206, 1, 0, 0), os.path.exists('/proc/self/mem'))"
    assert (await room.run(f'exec /usr/bin/python3 -c "{seize}"')).ok, room.lines
    assert room.lines == ["-1 True"]
    assert (await room.run("ls -A /proc/1")).ok
    assert (await room.run(": > /proc/1/new")).code == 2
    assert room.lines[1:-1] == [], "its folder is empty"


def become(uid: int) -> Callable[[], None]:
    return lambda: os.setresuid(uid, uid, uid)


SYSTEM_CALLS = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
tried = {
    "unshare": libc.unshare(0x10000000),
    "mount": libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "keyctl": libc.syscall(250, 0, -3, 0),
    "io_uring": libc.syscall(425, 8, ctypes.create_string_buffer(256)),
    "bpf": libc.syscall(321, 0, 0, 0),
    "userfaultfd": libc.syscall(323, 0),
    "perf": libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0),
    "clone": libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
}
for family, protocol in ((40, 0), (38, 0), (17, 0), (16, 31), (2, 262), (2, 132), (2, 1)):
    try: socket.socket(family, socket.SOCK_STREAM if protocol > 100 else socket.SOCK_DGRAM, protocol)
    except OSError: pass
    else: tried[f"socket {family} {protocol}"] = 0
print([name for name, result in tried.items() if result >= 0])
"""


async def test_dangerous_system_calls_are_refused(room: Room) -> None:
    room.write_script("attack.py", SYSTEM_CALLS)
    assert (await room.run("exec /usr/bin/python3 attack.py")).ok, room.lines
    assert room.lines == ["[]"]


async def test_tmp_and_shared_memory_are_private_and_work(each_room: Room) -> None:
    name = new_id("private")
    script = f"from multiprocessing import Lock; Lock(); open('/tmp/{name}', 'w'); open('/var/tmp/{name}', 'w')"
    assert (await each_room.run(f'/usr/bin/python3 -c "{script}"; ls /tmp/{name}')).ok, each_room.lines
    assert (await each_room.run(f"ls /tmp/{name}")).code == 2
    assert not os.path.exists(f"/tmp/{name}")


def test_no_folder_with_personal_data_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/home/me/.local/bin:/opt/tool/bin:/usr/bin:/bin")
    tools = Sandbox(development=True, users=BUILD_USERS)._list_tool_folders()
    assert not [path for path in tools if path.endswith("/share")]
    assert "/home/me/.local/share" not in tools


async def test_the_environment_contains_only_the_given_variables(room: Room) -> None:
    environment = {"PATH": os.environ["PATH"], "ONE": "1"}
    command = Command(arguments=["env"], folder=room.folder, environment=environment, write=[room.folder])
    assert (await room.sandbox.run(command, room.uid, room.lines.append)).ok
    assert sorted(line.partition("=")[0] for line in room.lines) == ["ONE", "PATH", "PWD"]


async def test_variables_load_no_code_outside_the_sandbox(room: Room) -> None:
    (room.top / "out").mkdir()
    (room.top / "out").chmod(0o777)
    code = room.top / "attack.c"
    code.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) void run() {{ creat("{room.top}/out/escaped", 0666); }}'
    )
    subprocess.run([require("gcc"), "-shared", "-fPIC", "-o", room.top / "attack.so", code], check=True)
    (room.top / "attack.so").chmod(0o755)
    command = room.command(
        "echo ran", SandboxLimits(), {"LD_PRELOAD": f"{room.top}/attack.so"}, read=[room.top / "attack.so"]
    )
    assert (await room.sandbox.run(command, room.uid, room.lines.append)).ok, room.lines
    assert room.lines[-1] == "ran"
    assert not (room.top / "out" / "escaped").exists()


async def test_no_descriptor_is_inherited_and_no_privilege_gained(each_room: Room) -> None:
    assert (await each_room.run("ls /proc/self/fd; grep NoNewPrivs /proc/self/status; echo shown > /dev/stdout")).ok
    assert each_room.lines == ["0", "1", "2", "3", "NoNewPrivs:\t1", "shown"]  # 3 is what `ls` reads


# -- users, and machines that can't isolate code --------------------------------------------------------------


async def test_no_two_builds_share_a_user() -> None:
    users_of_this_test = range(61_300, 61_303)  # other tests run at the same time
    one, other = (Sandbox(development=False, users=users_of_this_test) for _ in range(2))
    with one.reserve_user() as first, other.reserve_user() as second, one.reserve_user() as third:
        users = {first, second, third}
        assert users == {None} or (len(users) == 3 and users <= set(users_of_this_test))
        if first is not None:
            with pytest.raises(OSError, match="taken"), other.reserve_user():
                pass
    with other.reserve_user() as again:
        assert again == first


def unsafe(folder: Path, *, development: bool = False) -> str:
    with pytest.raises(Unsafe) as refused:
        Sandbox(development=development, users=BUILD_USERS).check(folder)
    return str(refused.value)


def test_a_machine_that_cannot_isolate_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with passable_folder() as folder:
        with monkeypatch.context() as patch:
            patch.setattr(cgroups, "find_parents", list)
            assert "memory and processes can't be bounded: delegate" in unsafe(folder)
            Sandbox(development=True, users=BUILD_USERS).check(folder)
        with monkeypatch.context() as patch:
            patch.setattr(tools, "find_bwrap", lambda copies, *, any_user: None)
            expected = "bubblewrap is missing: install its package, for example with apt install bubblewrap"
            assert unsafe(folder, development=True) == expected
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda _: (1_024, 1_024))
            assert "may open 4,096 files, but this process only 1,024: raise the hard" in unsafe(
                folder, development=True
            )
        with monkeypatch.context() as patch:
            patch.setattr(tools, "find_bwrap", lambda copies, *, any_user: "/bin/false")
            assert "bubblewrap can't make namespaces here" in unsafe(folder, development=True)
        with monkeypatch.context() as patch:
            patch.setattr(bwrap.platform, "machine", lambda: "riscv64")
            assert unsafe(folder, development=True).startswith("there is no system call filter for riscv64: ")


@pytest.mark.parametrize("development", [True, False])
def test_a_data_folder_that_builds_cannot_enter_or_can_read_is_refused(tmp_path: Path, development: bool) -> None:
    sandbox = Sandbox(development=development, users=BUILD_USERS)
    sandbox._root = True
    tmp_path.chmod(0o700)
    with pytest.raises(Unsafe, match=f"can't pass through {tmp_path}: chmod o\\+x {tmp_path}"):
        sandbox.check(tmp_path)
    assert "may read /usr" in unsafe(Path("/usr/share"))


# -- without a sandbox, for a developer's own code -----------------------------------------------------------


@pytest.fixture
def trusted() -> Iterator[Room]:
    with room_of(trusted=True) as room:
        yield room


async def test_trusted_commands_see_the_machine_and_never_run_as_root(trusted: Room) -> None:
    assert (await trusted.run("id -u; ls /etc/hostname; echo $MARK > file; cat file")).ok, trusted.lines
    uid, *seen = trusted.lines
    assert int(uid) == (os.geteuid() if trusted.uid is None else trusted.uid) != 0
    assert seen == ["/etc/hostname", trusted.mark]


async def test_trusted_commands_end_with_their_descendants(trusted: Room) -> None:
    script = "setsid sleep $MARK & (sleep $MARK &); "
    assert (await trusted.run(f"{script} exit 7")).code == 7
    assert trusted.alive() == []
    assert (await trusted.run(f"{script} sleep $MARK", seconds=0.5)).why == "time"
    assert trusted.alive() == []
    async with trusted.sandbox.start(
        trusted.command(f"{script} echo up; sleep $MARK", SandboxLimits()), trusted.uid, trusted.lines.append
    ):
        await wait_until(lambda: trusted.lines[-1:] == ["up"])
    assert trusted.alive() == []


# -- output --------------------------------------------------------------------------------------------------


async def test_endless_output_does_not_block_the_event_loop(room: Room) -> None:
    wakeups, seen = 0, 0
    running = asyncio.create_task(room.run("yes and again and again", seconds=0.5))
    while not running.done():
        await asyncio.sleep(0.01)
        wakeups, seen = wakeups + (len(room.lines) > seen), len(room.lines)
    assert (await running).why == "time"
    assert len(room.lines) > 10_000  # which arrive within a second; shorter lines would take several
    assert wakeups > 3, "this task ran while output arrived"


async def test_a_command_that_cannot_start_leaves_no_descriptor_open(room: Room) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    assert (await room.run("x" * 200_000)).code == 126
    assert "too long" in room.lines[-1]
    assert len(os.listdir("/proc/self/fd")) == descriptors


REPORT = f"""
from workers.sandbox.machine import *
users = range({BUILD_USERS.start}, {BUILD_USERS.stop})
try:
    check_own_user(users)
except Unsafe as error:
    print(error)
else:
    print("changes users" if can_change_users(users) else "runs them as itself")
print(find_namespace_remedy())
"""
needs_root = pytest.mark.skipif(not ROOT, reason="only root has these powers")


def report(*before: str) -> list[str]:
    done = subprocess.run([*before, sys.executable, "-c", REPORT], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_container_without_the_users_names_the_map_that_lacks_them() -> None:
    first = report(*enter_user_namespace())[0]
    assert first == (": ".join(FAULT) if ROOT else "runs them as itself")


def test_the_setting_that_refuses_namespaces_is_named() -> None:
    assert report(*enter_user_namespace())[-1] == "sudo sysctl -w user.max_user_namespaces=15000"


@needs_root
def test_root_without_capabilities_runs_nothing() -> None:
    """Otherwise it would run the code as root."""
    first = report("setpriv", "--bounding-set=-all", "--inh-caps=-all")[0]
    assert first == "builds would run as root: run the worker as an ordinary user"


@needs_root
def test_some_capabilities_are_refused() -> None:
    first = report("setpriv", "--bounding-set=-setuid,-sys_ptrace")[0]
    assert first.startswith("the worker has some of root's capabilities: give it CHOWN, KILL")
