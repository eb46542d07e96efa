"""Packs the command line as a wheel that needs none of the service's packages, for machines that have only Python.

The wheel has the modules of the command line that call a service, what they import of `gateway`, and the templates of
`capsule new`. It is made from the files that run here, so it is the same in a clone, an installation and an image, and
needs no network. Its version ends with a hash of its contents, so pip replaces one that differs.
"""

import ast
import base64
import hashlib
import importlib.metadata
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gateway.deploys.templates import TEMPLATES, list_template_files

DISTRIBUTION, PACKAGE = "capsule-gateway", "capsule_gateway"
ROOT = Path(__file__).parents[2]  # of the repository, or of the installed package
FOLDERS = {PACKAGE: ROOT / PACKAGE if (ROOT / PACKAGE).is_dir() else ROOT, "gateway": ROOT / "gateway"}
SERVICE_COMMANDS = {"backup", "dev", "doctor", "processes", "secrets"}  # run the service, or need its data

# The packages that the modules import. `capsule mcp` needs more than all others together, which are an extra.
REQUIRED = {"click", "httpx", "msgspec", "pathspec", "python-dotenv", "rich"}
EXTRAS = {"mcp": {"mcp", "pydantic"}}

WHEEL = "Wheel-Version: 1.0\nGenerator: capsule-gateway\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ENTRY_POINTS = f"[console_scripts]\ncapsule = {PACKAGE}:main\n"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that a zip archive can express


class ClientWheel(NamedTuple):
    name: str
    content: bytes


@cache
def client_wheel() -> ClientWheel:
    """Packs the wheel, once per process."""
    files = {**_read_modules(), **_read_templates()}
    service = importlib.metadata.distribution(DISTRIBUTION)
    requirements = _list_requirements(service.requires or [])
    digest = hashlib.sha256(repr([requirements, *sorted(files.items())]).encode()).hexdigest()[:12]
    version = f"{service.version}+client{digest}"
    info = f"{PACKAGE}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {DISTRIBUTION}",
        f"Version: {version}",
        f"Requires-Python: {service.metadata['Requires-Python']}",
        *(f"Provides-Extra: {extra}" for extra in EXTRAS),
        *(f"Requires-Dist: {requirement}" for requirement in requirements),
    ]
    files[f"{info}/METADATA"] = "\n".join([*metadata, ""]).encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    files[f"{info}/entry_points.txt"] = ENTRY_POINTS.encode()
    files[f"{info}/licenses/LICENSE"] = (service.read_text("licenses/LICENSE") or "").encode()
    files[f"{info}/RECORD"] = _list_files(files, f"{info}/RECORD")
    return ClientWheel(f"{PACKAGE}-{version}-py3-none-any.whl", _pack(files))


def _list_requirements(all_of_service: list[str]) -> list[str]:
    """Returns the requirements of the client, with the versions that the service accepts."""
    accepted = {re.split(r"[^\w.-]", line)[0]: line for line in all_of_service if "extra ==" not in line}
    extras = (f'{accepted[name]}; extra == "{extra}"' for extra, names in EXTRAS.items() for name in sorted(names))
    return [*(accepted[name] for name in sorted(REQUIRED)), *extras]


# -- contents ------------------------------------------------------------------------------------------------


def _read_modules() -> dict[str, bytes]:
    """Returns the files of the modules by their names in the wheel, which has them in one package."""
    commands = sorted((FOLDERS[PACKAGE] / "cli").glob("*.py"))
    waiting = [f"{PACKAGE}.cli.{path.stem}" for path in commands if path.stem not in {*SERVICE_COMMANDS, "__init__"}]
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = _find_file(name)
        if file is None or name in found:
            continue
        found[name] = file
        waiting.append(name.rpartition(".")[0])
        if name != PACKAGE:  # whose functions start the command line, or the service
            waiting += _list_imports(ast.parse(file.read_bytes()))
    return {_name_in_wheel(path): path.read_bytes() for path in found.values()}


def _find_file(module: str) -> Path | None:
    top, *rest = module.split(".")
    if top not in FOLDERS:
        return None
    path = FOLDERS[top].joinpath(*rest)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def _name_in_wheel(path: Path) -> str:
    inside = path.relative_to(FOLDERS[PACKAGE] if path.is_relative_to(FOLDERS[PACKAGE]) else ROOT)
    return f"{PACKAGE}/{inside.as_posix()}"


def _list_imports(node: ast.AST) -> Iterator[str]:
    """Yields what a module imports anywhere, except for types only: names of modules, and of what is in them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield str(child.module)
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _list_imports(child)


def _read_templates() -> dict[str, bytes]:
    return {_name_in_wheel(path): path.read_bytes() for path in list_template_files(TEMPLATES)}


# -- archive -------------------------------------------------------------------------------------------------


def _list_files(files: Mapping[str, bytes], record: str) -> bytes:
    """Returns the wheel's list of its files, with their digests and sizes."""
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{record},,\n"]).encode()


def _pack(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return buffer.getvalue()
