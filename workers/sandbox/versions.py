"""Chooses the versions of Node.js and Python that a source asks for, among those on this host.

A build and the start command of its release choose by the same files, so they use the same versions.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from semantic_version import NpmSpec, Version  # type: ignore[import-untyped]

from gateway.deploys.unbuilt import Files
from workers.sandbox.tools import NODE, PYTHON, Program

WISH_CHARACTERS = 100


class Versions(NamedTuple):
    folders: list[str]  # to put in front of PATH
    lines: list[str]  # for the log of a build


class Wish(NamedTuple):
    tool: str
    file: str
    text: str  # a range of npm, or a version of Python

    @property
    def range(self) -> NpmSpec | None:
        """None for what is no range, such as `lts/*`."""
        # A Python is found by its minor version, because hosts have only one of each.
        text = ".".join(self.text.split(".")[:2]) if self.tool == PYTHON else self.text
        try:
            return NpmSpec(re.sub(r"([<>=~^])\s+", r"\1", text))
        except (ValueError, AttributeError):  # the library's own of a hyphen without versions, as in `1 [ -`
            return None


def choose_versions(files: Files, tools: Sequence[Program]) -> Versions:
    """Returns which versions to use, and what the log should say about them."""
    folders, lines = [], []
    for wish in _read_wishes(files):
        asks = f"{wish.file} asks for {wish.tool} {wish.text}"
        found = [tool for tool in tools if tool.name == wish.tool]
        shown = f"{wish.tool} {' and '.join(tool.version for tool in found)}" if found else f"no {wish.tool}"
        if wish.range is None:
            lines.append(f"{asks}, which is no version; using the default one")
            continue
        fitting = [tool for tool in found if wish.range.match(Version(tool.version))]
        if not fitting:
            lines.append(f"{asks}; this host has {shown}")
        elif fitting[0] != found[0]:
            best = max(fitting, key=lambda tool: Version(tool.version))
            folders.append(best.folder)
            lines.append(f"{asks}; using {best.version}")
    return Versions(folders, lines)


def _read_wishes(files: Files) -> Iterator[Wish]:
    """Yields at most one for each tool."""
    for tool, names in ((NODE, (".nvmrc", ".node-version", "package.json")), (PYTHON, (".python-version",))):
        wishes = (Wish(tool, name, _read_wish(files, name)) for name in names)
        yield from [wish for wish in wishes if wish.text][:1]


def _read_wish(files: Files, name: str) -> str:
    text = files.read(name)
    if name == "package.json":
        try:
            text = json.loads(text)["engines"]["node"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return ""
    text = text.strip().partition("\n")[0].strip() if isinstance(text, str) else ""
    return text if len(text) <= WISH_CHARACTERS and text.isprintable() else ""
