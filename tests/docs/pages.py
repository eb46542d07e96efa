"""Takes the examples of a page from the page itself, section by section, and runs each language."""

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.programs import require

DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 100  # that an example may take
TOOLS = {"curl", "node"}

BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Run(NamedTuple):
    code: int
    out: str
    err: str


class Section:
    """The code blocks under one heading. A test takes all of them."""

    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self._blocks = BLOCK.findall(text)

    @property
    def left(self) -> int:
        return len(self._blocks)

    def has(self, language: str) -> bool:
        return any(block[0] == language for block in self._blocks)

    def take(self, language: str) -> str:
        """Returns the next block in the language."""
        block = next(block for block in self._blocks if block[0] == language)
        self._blocks.remove(block)
        return block[1]


def sections(name: str, addresses: Mapping[str, str]) -> dict[str, Section]:
    """Returns the sections of a page that have examples, with the running servers' addresses instead of the page's."""
    text = (DOCS / name).read_text()
    for address, local in addresses.items():
        text = text.replace(address, local)
    _, *parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    found = [Section(title, part) for title, part in zip(parts[::2], parts[1::2], strict=True)]
    return {section.title: section for section in found if section.left}


async def run(*command: str, folder: Path, given: str = "", seconds: float = SECONDS, **environment: str) -> Run:
    require(command[0])
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": tools, "HOME": str(folder), "NO_COLOR": "1", **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(given.encode()), seconds)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Run(process.returncode, out.decode(), err.decode())


async def run_shell(block: str, folder: Path, **environment: str) -> Run:
    for tool in TOOLS & set(block.split()):
        require(tool)
    return await run("bash", "-euc", block, folder=folder, **environment)


async def run_python(block: str, folder: Path, **environment: str) -> str:
    """Returns its standard output."""
    done = await run(sys.executable, "-c", block, folder=folder, **environment)
    assert done.code == 0, done.err
    return done.out


async def run_node(script: str, folder: Path, **environment: str) -> str:
    """Returns the standard output of a module, which can import files of the folder."""
    done = await run("node", "--input-type=module", "-e", script, folder=folder, **environment)
    assert done.code == 0, done.err
    return done.out
