"""ai.js matches ai.d.ts, and a TypeScript app can use it: tsc checks both in its strictest mode."""

import subprocess

from tests.browser.packages import HERE, require


def test_the_types_hold() -> None:
    tsc = require(".bin/tsc")
    checked = subprocess.run([tsc, "--project", HERE], capture_output=True, text=True, check=False, timeout=120)
    assert checked.returncode == 0, checked.stdout
