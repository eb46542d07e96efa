"""Generates parts of the documentation from the code: `python -m docs.generate`.

Writes the tables of keyspace.md from the module that builds the keys, modules.md from the first line of each module,
and the JSON schema of capsule.toml.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from gateway.deploys.manifest import manifest_schema

DOCS = Path(__file__).parent
ROOT = DOCS.parent
TABLES = re.compile(r"(<!-- tables -->\n).*(<!-- end of tables -->\n)", re.DOTALL)
MODULES = """# Modules

This page lists every module of the service with the first line of its docstring. `python -m docs.generate` writes it,
and a test checks that it is up to date. [architecture.md](architecture.md) explains how the modules work together.
"""


def describe(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def keyspace() -> str:
    tables = describe(ROOT / "gateway/keys.py")
    page = (DOCS / "keyspace.md").read_text()
    return TABLES.sub(lambda match: match[1] + "\n" + tables[tables.index("## ") :] + "\n\n" + match[2], page)


def modules() -> str:
    return "\n".join([MODULES, *sections()])


def sections() -> Iterator[str]:
    """Yield a section for each folder, with a table of its modules."""
    folders = {path.parent for top in ("capsule_gateway", "gateway", "workers") for path in (ROOT / top).rglob("*.py")}
    for folder in sorted(folders):
        lines = [f"| `{path.name}` | {first_line(path)} |" for path in sorted(folder.glob("*.py")) if describe(path)]
        if lines:
            yield "\n".join([f"## {folder.relative_to(ROOT)}/\n", "| module | |", "| --- | --- |", *lines, ""])


def first_line(path: Path) -> str:
    """Return the first line of the module's docstring."""
    return describe(path).splitlines()[0].replace("|", "\\|")


def schema() -> str:
    return json.dumps(manifest_schema(), indent=2) + "\n"


if __name__ == "__main__":
    (DOCS / "capsule.schema.json").write_text(schema())
    (DOCS / "keyspace.md").write_text(keyspace())
    (DOCS / "modules.md").write_text(modules())
