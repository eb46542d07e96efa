"""A short run: a gateway, a worker and a primary are killed, and a slot moves."""

import subprocess
import sys

# The recovery of a busy machine is not under test here.
COMMAND = ["--minutes", "1", "--steps", "2", "--seed", "32308", "--rate", "40", "--recovery", "30", "--no-leases"]


def test_nothing_is_violated() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *COMMAND], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    for kind in ("kill gateway", "kill worker", "kill primary", "move slot"):
        assert f"| {kind} | 1 |" in run.stdout
