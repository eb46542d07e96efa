"""Builds the wheel of this source tree, and installs it as users do."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Builds the wheel, unless `make release` has built it already."""
    if released := os.environ.get("CAPSULE_WHEEL"):
        return Path(released)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, extra: str, python: str = sys.executable) -> Path:
    """Makes a virtual environment and returns its folder of programs.

    Only the wheel's requirements are linked from the environment of the tests. For another Python version, compiled
    packages are downloaded. pip fails if a requirement is missing or has a version that the wheel does not accept.
    """
    run(python, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "-q", "install", "--no-compile"]
    if download := link_requirements(wheel, folder, extra, python):
        run(*pip, "--no-deps", "--only-binary=:all:", *download)
    run(*pip, "--no-index", f"{wheel}[{extra}]")
    return folder / "bin"


def link_requirements(wheel: Path, folder: Path, extra: str = "", python: str = sys.executable) -> list[str]:
    """Links the wheel's requirements into a virtual environment. Returns those that must be downloaded for it."""
    [packages] = folder.glob("lib/*/site-packages")
    download = []
    for name in _find_required(_read_requirements(wheel), extra):
        distribution = importlib.metadata.distribution(name)
        files = distribution.files or []
        if python != sys.executable and any(sysconfig.get_config_var("SOABI") in file.name for file in files):
            download.append(f"{name}=={distribution.version}")
            continue
        for program in (file for file in files if file.parts[-2:-1] == ("bin",) and file.parts[0] == ".."):
            (folder / "bin" / program.name).symlink_to(Path(distribution.locate_file(program)).resolve())
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return download


def find_pythons() -> dict[str, str]:
    """Returns the interpreters of this machine by version, including those of all versions in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    found = {}
    for version in supported:
        by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        if program := by_pyenv[-1] if by_pyenv else shutil.which(f"python{version}"):
            found[version] = str(program)
    return {**found, f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}


def _read_requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return re.findall(r"^Requires-Dist: (.+)$", archive.read(name).decode(), re.MULTILINE)


def _find_required(requirements: list[str], extra: str) -> set[str]:
    """Returns the names of all distributions that these requirements need, directly or indirectly."""
    found: dict[str, set[str]] = {}  # with the extras that were followed
    waiting = [(line, extra) for line in requirements]
    while waiting:
        line, active = waiting.pop()
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": active}):
            continue
        known = found.setdefault(needed.name, set())
        for one in {"", *needed.extras} - known:
            known.add(one)
            waiting += [(line, one) for line in importlib.metadata.requires(needed.name) or []]
    return {*found}


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
