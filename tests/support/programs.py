"""Finds and runs programs that tests need and that may not be installed."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import pytest

# The Debian package of each program.
PACKAGES = {
    "caddy": "caddy",
    "chromium-headless-shell": "chromium-headless-shell",
    "curl": "curl",
    "faketime": "faketime",
    "gcc": "gcc",
    "git": "git",
    "git-lfs": "git-lfs",
    "go": "golang-go",
    "java": "default-jdk-headless",
    "nginx": "nginx-light",
    "node": "nodejs",
    "npm": "npm",
    "prometheus": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "prometheus-redis-exporter": "prometheus-redis-exporter",
    "promtool": "prometheus",
    "redis-server": "redis-server",
    "unshare": "util-linux",
}


def require(program: str, *others: str) -> str:
    """Returns the path of the program or of an alternative. Without them, a test skips, and in CI it fails."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    for name in (program, *others):
        if found := shutil.which(name, path=path):
            return found
    miss(program)


def miss(program: str) -> NoReturn:
    """Skips a test whose program is missing, or fails it in CI."""
    if os.environ.get("CI"):
        raise RuntimeError(f"{program} is missing, and CI must run every test")
    pytest.skip(f"{program} is not installed: the package {PACKAGES[program]}")


@contextlib.contextmanager
def running(
    *command: str | Path, log: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program with its output in the file until the block ends, and kills it."""
    with open(log or os.devnull, "wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def on_small_disk(folder: Path, mib: int = 1) -> list[str]:
    """Returns the prefix of a command that finds an empty disk of this size at the folder."""
    mount = f"mount -t tmpfs -o size={mib}m none '{folder}' && exec \"$@\""
    return [require("unshare"), "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
