import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.polling import wait_until
from tests.support.sandbox import USERS, Room, marked
from workers.sandbox.sandbox import MIB, Command, Limits, Outcome

# -- limits --------------------------------------------------------------------------------------------------

FILL = "i=0; while :; do i=$((i+1)); head -c 1M /dev/zero > $i; done"


@pytest.mark.parametrize(
    ("script", "limits", "told"),
    [
        ("sleep $MARK", Limits(seconds=0.4), "it took longer than 0 seconds"),
        ("head -c 300M /dev/zero | tail", Limits(memory=100 * MIB), "it ran out of memory; it may use 100 MiB"),
        (FILL, Limits(disk=20 * MIB), "it wrote more than 20 MiB"),
        ("head -c 30M /dev/zero > fast", Limits(disk=20 * MIB), "it wrote more than 20 MiB"),
        ("exec head -c 90M /dev/zero > large", Limits(disk=20 * MIB), "it wrote more than 20 MiB"),
        ("while :; do sleep $MARK & done", Limits(processes=40), "it started more than 40 processes"),
    ],
)
async def test_a_limit_ends_it_and_says_which(room: Room, script: str, limits: Limits, told: str) -> None:
    ended = await room.sandbox.run(room.command(script, limits), room.uid, room.lines.append)
    assert ended.describe("it", limits) == told
    assert room.alive() == []


@pytest.mark.parametrize(
    ("script", "ended", "said"),
    [
        ("exit 7", Outcome(7), []),
        ("kill -TERM $$", Outcome(-15), []),
        ("PATH=/bin; exec nowhere", Outcome(127), ["sh: 1: exec: nowhere: not found"]),
    ],
)
async def test_its_exit_is_told(room: Room, script: str, ended: Outcome, said: list[str]) -> None:
    assert await room.run(script) == ended
    assert room.lines == said


async def test_a_missing_program_is_told(room: Room) -> None:
    command = Command(arguments=["nowhere"], folder=room.folder, environment=room.sandbox.environment)
    assert await room.sandbox.run(command, room.uid, room.lines.append) == Outcome(126)
    assert room.lines[0].startswith("nowhere: ")


# -- its end is the end of all of it -------------------------------------------------------------------------

LEFT_BEHIND = "sleep $MARK & setsid sleep $MARK & (setsid sh -c '(sleep $MARK &) ; sleep $MARK' &) ; sleep 0.1; "


async def test_what_it_leaves_behind_is_killed(each_room: Room) -> None:
    began = time.monotonic()
    assert await each_room.run(f"{LEFT_BEHIND} echo done; exit 3") == Outcome(3)
    assert each_room.lines == ["done"]
    assert each_room.alive() == []
    assert time.monotonic() - began < 5


async def test_cancelled_all_of_it_is_dead_before_the_return(each_room: Room) -> None:
    running = asyncio.create_task(each_room.run(f"trap '' TERM; {LEFT_BEHIND} echo there; sleep $MARK"))
    await wait_until(lambda: each_room.lines == ["there"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert each_room.alive() == []


async def test_cancelled_at_any_instant_nothing_is_left(room: Room) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for delay in (0, 0.01, 0.03, 0.05, 0.08):
        running = asyncio.create_task(room.run("sleep $MARK"))
        await asyncio.sleep(delay)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert room.alive() == []
    await wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


async def test_told_to_stop_it_has_its_grace(room: Room) -> None:
    script = "trap 'echo stopping; exit 4' TERM; echo ready; while :; do sleep 0.05; done"
    async with room.sandbox.start(room.command(script, Limits(grace=5)), room.uid, room.lines.append) as ending:
        await wait_until(lambda: room.lines == ["ready"])
    assert ending.result() == Outcome(4, "stopped")
    assert room.lines[-1] == "stopping"


@pytest.mark.parametrize("victim", ["worker", "keeper"])
async def test_it_dies_with_its_worker_and_with_its_keeper(room: Room, victim: str) -> None:
    """Killed, so that neither can do anything about it."""
    script = textwrap.dedent(f"""
        import asyncio, os, sys
        from pathlib import Path
        from workers.sandbox.sandbox import *
        sandbox = Sandbox(development=False, users=BUILD_USERS)
        async def main():
            with sandbox.reserve_user() as uid:
                folder = Path({str(room.build)!r}, "another")
                folder.mkdir()
                sandbox.give_to_user(folder, uid)
                command = Command(arguments=["sh", "-c", "echo $PPID; exec sleep {room.mark}"], folder=folder,
                    environment=sandbox.environment, write=[folder])
                await sandbox.run(command, uid, lambda line: print(os.getpid(), line, flush=True))
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as output:
        worker, keeper = map(int, output.readline().split())
        assert await wait_until(lambda: f"sleep {room.mark} " in marked(room.mark))
        os.kill(worker if victim == "worker" else keeper, signal.SIGKILL)
        await wait_until(lambda: f"sleep {room.mark} " not in marked(room.mark), 2)
        process.kill()


@pytest.mark.skipif(not USERS, reason="only as root")
async def test_what_a_killed_keeper_left_goes_before_its_user_is_used_again(room: Room) -> None:
    command = room.command("sleep $MARK & echo $PPID; sleep $MARK", Limits())
    async with room.sandbox.start(command, room.uid, room.lines.append) as ending:
        await wait_until(lambda: room.lines)
        os.kill(int(room.lines[0]), signal.SIGKILL)
        assert await ending == Outcome(-9, "stopped")
    assert room.alive()
    assert (await room.run("true")).ok
    assert room.alive() == []
