"""The npm packages of the tests: `package.json` lists them, and the first test that needs one installs all."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import programs

HERE = Path(__file__).parent


def require(path: str) -> Path:
    """Returns the file at `path` in node_modules, and installs the packages first if needed."""
    wanted = HERE / "node_modules" / path
    with (HERE / "package.json").open() as lock:  # tests may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not wanted.exists():
            # `npm ci` needs the packages for every system in the lock file, and a registry may have those for one only.
            command = [programs.require("npm"), "install", "--no-save", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=HERE, capture_output=True, check=False, timeout=180)
    if not wanted.exists():
        if os.environ.get("CI"):
            raise RuntimeError(f"npm can't install {path}, and CI must run every test")
        pytest.skip(f"npm can't install {path}: it does not reach its registry")
    return wanted
