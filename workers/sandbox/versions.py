"""Chooses the versions of Node.js and Python that a source asks for, among those on this host.

A build and the start command of its release choose by the same files, so they use the same versions. A file that pins
one version counts before a range, and a host that lacks the pinned version uses the default one of the range. No
version of the host in the range is a problem, with which a build fails.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from semantic_version import NpmSpec, Version  # type: ignore[import-untyped]

from gateway.deploys.recognition import PACKAGE, PROJECT
from gateway.deploys.unbuilt import Files
from gateway.settings.toml import parse_toml
from workers.sandbox.tools import NODE, PYTHON, Program

WISH_CHARACTERS = 100


PINS = {NODE: (".nvmrc", ".node-version"), PYTHON: (".python-version",)}  # the first one with a version counts


class Versions(NamedTuple):
    folders: list[str]  # to put in front of PATH
    lines: list[str]  # for the log of a build
    problem: str = ""  # why the source can't be built here


class Wish(NamedTuple):
    tool: str
    file: str
    text: str  # a range of npm or of Python, or one version

    def __str__(self) -> str:
        return f"{self.file} asks for {self.tool} {self.text}"

    def select(self, tools: Sequence[Program]) -> list[Program] | None:
        """Returns the programs that fit. None if the wish is no range, such as `lts/*`."""
        try:
            spec = NpmSpec(_as_npm_range(self))
        except (ValueError, AttributeError):  # the library's own of a hyphen without versions, as in `1 [ -`
            return None
        return [tool for tool in tools if spec.match(Version(tool.version))]


def _as_npm_range(wish: Wish) -> str:
    text = wish.text
    if wish.file in PINS[PYTHON]:
        # A Python is found by its minor version, because hosts have only one of each.
        return ".".join(text.split(".")[:2])
    if wish.tool == PYTHON:
        text = re.sub(r"!=[^,]*", "", text)  # it may exclude single versions, which is left to the package manager
        text = re.sub(r"~=\s*(\d+\.\d+)(?![.\d])", r"^\1", text).replace("~=", "~").replace("==", "=")
        text = re.sub(r">\s*(\d+\.\d+)(?![.\d])", r">\1.0", text)  # 3.11.2 is more than 3.11
        text = text.replace(",", " ").replace(".*", ".x").strip()
    return re.sub(r"([<>=~^])\s+", r"\1", text)


def choose_versions(files: Files, tools: Sequence[Program]) -> Versions:
    """Returns which versions to use, and what the log should say about them."""
    folders, lines, problem = list[str](), list[str](), ""
    for name, pins in PINS.items():
        found = [tool for tool in tools if tool.name == name]
        shown = f"this host has {f'{name} ' + ' and '.join(tool.version for tool in found) if found else f'no {name}'}"
        chosen, reason = found, ""
        for wish, is_pin in _read_wishes(files, name, pins):
            fitting = wish.select(found)
            if fitting is None:
                lines.append(f"{wish}, which is no version; using the default one")
            elif fitting:
                chosen, reason = fitting, str(wish)
                break
            elif is_pin or not found:
                lines.append(f"{wish}; {shown}")
            else:
                problem = problem or f"{wish}; {shown}"
        if reason and chosen[0] != found[0]:
            best = max(chosen, key=lambda tool: Version(tool.version))
            folders.append(best.folder)
            lines.append(f"{reason}; using {best.version}")
    return Versions(folders, lines, problem)


def _read_wishes(files: Files, tool: str, pins: Sequence[str]) -> Iterator[tuple[Wish, bool]]:
    """Yields the wish of a file that pins a version, then that of a range. The second value says which one it is."""
    pinned = ((name, _clean(files.read(name))) for name in pins)
    yield from [(Wish(tool, name, text), True) for name, text in pinned if text][:1]
    name, wish = (PACKAGE, _read_engines(files)) if tool == NODE else (PROJECT, _read_python_range(files))
    if text := _clean(wish):
        yield Wish(tool, name, text), False


def _read_engines(files: Files) -> object:
    try:
        return json.loads(files.read(PACKAGE))["engines"]["node"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""


def _read_python_range(files: Files) -> object:
    try:
        project = parse_toml(files.read(PROJECT))
    except ValueError:
        return ""
    for names in (("project", "requires-python"), ("tool", "poetry", "dependencies", "python")):
        value: Any = project
        for name in names:
            value = value.get(name, "") if isinstance(value, dict) else ""
        if value:
            return value
    return ""


def _clean(text: object) -> str:
    text = text.strip().partition("\n")[0].strip() if isinstance(text, str) else ""
    return text if len(text) <= WISH_CHARACTERS and text.isprintable() else ""
