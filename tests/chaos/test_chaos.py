"""Runs a short chaos test with eight faults, two in each of its four steps."""

import signal
import subprocess
import sys

from tests.support.priority import raised_priority
from tests.support.sandbox import require_control_groups

# The recovery may take 30 s, because other tests keep the machine busy. With this seed, each step has two faults.
COMMAND = [
    *(sys.executable, "-m", "tests.chaos", "--small", "--minutes", "1.5", "--steps", "4"),
    *("--seed", "183062", "--rate", "40", "--recovery", "30"),
]
KINDS = (
    *("kill gateway", "stop gateway", "kill worker", "stop worker"),
    *("kill primary", "fail over", "move slot", "cut provider"),
)


def test_nothing_is_violated() -> None:
    require_control_groups()
    with raised_priority():
        run = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = run.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGTERM)  # the run stops the processes that it has started
            output, _ = run.communicate(timeout=40)
        finally:
            run.kill()
    assert run.returncode == 0, output[-8000:]
    for kind in KINDS:
        assert f"| {kind} | 1 |" in output
