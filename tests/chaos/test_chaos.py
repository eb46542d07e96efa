"""Runs a short chaos test with eight faults, two in each of its four steps, and one with a bug that it must find."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.priority import raised_priority
from tests.support.sandbox import require_control_groups

# The recovery may take 30 s, because other tests keep the machine busy. With this seed, each step has two faults.
COMMAND = ["--small", "--minutes", "1.5", "--steps", "4", "--seed", "10927", "--rate", "40", "--recovery", "30"]
KINDS = (
    *("kill gateway", "stop gateway", "kill worker", "stop worker"),
    *("kill primary", "fail over", "move slot", "cut provider"),
)


@pytest.fixture(scope="module", autouse=True)
def priority() -> Iterator[None]:
    with raised_priority():
        yield


def run_chaos(*options: str) -> tuple[int, str]:
    """Returns the exit code and the output."""
    require_control_groups()
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = run.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGTERM)  # the run stops the processes that it has started
        output, _ = run.communicate(timeout=40)
    finally:
        run.kill()
    return run.returncode, output[-8000:]


def test_nothing_is_violated() -> None:
    code, output = run_chaos(*COMMAND)
    assert code == 0, output
    for kind in KINDS:
        assert f"| {kind} | 1 |" in output


def test_planted_bug_is_found() -> None:
    steps = ("--minutes", "0.6", "--steps", "3", "--seed", "10927")
    code, output = run_chaos("--small", *steps, "--redis", "single", "--plant", "mix streams")
    assert code == 0, output


def test_every_bug_can_be_planted() -> None:
    """The code that it patches exists."""
    code = "from tests.chaos.planted import PLANTS\nfor plant in PLANTS.values(): plant.apply()"
    planting = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert planting.returncode == 0, planting.stderr
