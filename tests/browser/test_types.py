"""ai.js holds what ai.d.ts promises, and a TypeScript app can use it; tsc looks, in its strictest mode."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tsc() -> Path:
    installed = HERE / "node_modules" / ".bin" / "tsc"
    npm = shutil.which("npm")
    if not installed.exists() and npm:
        subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=HERE, capture_output=True, check=False, timeout=180)
    if not installed.exists():
        if os.environ.get("CI"):
            raise RuntimeError("TypeScript cannot be installed, and CI must run every test")
        pytest.skip("TypeScript is not installed and cannot be: no npm, or no network")
    return installed


def test_the_types_hold(tsc: Path) -> None:
    checked = subprocess.run([tsc, "--project", HERE], capture_output=True, text=True, check=False, timeout=120)
    assert checked.returncode == 0, checked.stdout
