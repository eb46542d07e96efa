"""Programs that tests need and the machine may lack."""

import os
import shutil
from typing import NoReturn

import pytest

# By program: the package of Debian that brings it.
PACKAGES = {
    "caddy": "caddy",
    "chromium-headless-shell": "chromium-headless-shell",
    "curl": "curl",
    "gcc": "gcc",
    "git": "git",
    "go": "golang-go",
    "java": "default-jdk-headless",
    "nginx": "nginx-light",
    "node": "nodejs",
    "npm": "npm",
    "prometheus-redis-exporter": "prometheus-redis-exporter",
    "promtool": "prometheus",
    "redis-server": "redis-server",
    "unshare": "util-linux",
}


def require(program: str, *others: str) -> str:
    """Path of the program, or of another one that does as well. A person without them skips; CI must have one."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    for name in (program, *others):
        if found := shutil.which(name, path=path):
            return found
    miss(program)


def miss(program: str) -> NoReturn:
    """The test needs the program and can't have it."""
    if os.environ.get("CI"):
        raise RuntimeError(f"{program} is missing, and CI must run every test")
    pytest.skip(f"{program} is not installed: the package {PACKAGES[program]}")
