"""Every bug that a run must find can be planted: the code that it patches exists."""

import subprocess
import sys

PLANT_ALL = "from tests.chaos.planted import PLANTS\nfor plant in PLANTS.values(): plant.apply()"


def test_every_bug_can_be_planted() -> None:
    command = [sys.executable, "-c", PLANT_ALL]
    planting = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert planting.returncode == 0, planting.stderr
