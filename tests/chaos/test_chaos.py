"""A short run with eight faults, two at once in each of its four steps, and one with a bug that it must find."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.priority import raised_priority
from tests.support.sandbox import require_control_groups

# The recovery of a busy machine is not under test here. With this seed, each step has two faults.
COMMAND = ["--small", "--minutes", "1.5", "--steps", "4", "--seed", "10927", "--rate", "40", "--recovery", "30"]
KINDS = (
    *("kill gateway", "stop gateway", "kill worker", "stop worker"),
    *("kill primary", "fail over", "move slot", "cut provider"),
)


@pytest.fixture(scope="module", autouse=True)
def priority() -> Iterator[None]:
    with raised_priority():
        yield


def chaos(*options: str) -> tuple[int, str]:
    """The exit code, and what it said."""
    require_control_groups()
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = run.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGTERM)  # it stops what it has started
        said, _ = run.communicate(timeout=40)
    finally:
        run.kill()
    return run.returncode, said[-8000:]


@pytest.mark.timeout(240)
def test_nothing_is_violated() -> None:
    code, said = chaos(*COMMAND)
    assert code == 0, said
    for kind in KINDS:
        assert f"| {kind} | 1 |" in said


@pytest.mark.timeout(240)
def test_planted_bug_is_found() -> None:
    code, said = chaos("--small", "--minutes", "0.2", "--steps", "1", "--redis", "single", "--plant", "mix streams")
    assert code == 0, said
