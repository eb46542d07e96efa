"""A test run that ends or is killed leaves no process behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.polling import wait_until

# The sleeping process is in a session of its own, and its parent has ended, as with a Caddy whose worker was killed.
RUN = """
import subprocess, sys
from tests.support.guard import run_under_guard
run_under_guard()
subprocess.run(["sh", "-c", "setsid sleep 600 <&- >&- & echo $!"])
sys.stdin.readline()
sys.exit(3)
"""


def run() -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", RUN]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


async def find_orphan(process: "subprocess.Popen[bytes]") -> Path:
    assert process.stdout
    orphan = int(process.stdout.readline())
    await wait_until(lambda: os.getsid(orphan) == orphan)
    return Path(f"/proc/{orphan}")


async def test_a_run_that_ends() -> None:
    with run() as process:
        orphan = await find_orphan(process)
        process.communicate(b"\n", 20)
        assert process.returncode == 3
        await wait_until(lambda: not orphan.exists())


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_run_that_is_killed(kill: Callable[[int, int], None], number: signal.Signals) -> None:
    with run() as process:
        orphan = await find_orphan(process)
        kill(process.pid, number)
        assert process.wait(20) == -number
        await wait_until(lambda: not orphan.exists())


def test_a_run_in_the_background_of_a_script_gets_ctrl_c() -> None:
    """Its shell ignores the signal, and what the tests start would do the same."""
    code = "run_under_guard(); print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = f"import signal\nfrom tests.support.guard import run_under_guard\n{code}"
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == b"True\n"
