"""Writes the folder of a new app from a template of the package.

`capsule/template` has a folder for each template, and in `shared` what both use. Each app has a copy of the browser
module in `capsule/lib`, which the templates do not contain.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

CAPSULE = Path(__file__).parents[2] / "capsule"
PLACEHOLDER = b"__NAME__"
NOT_COPIED = {"node_modules", "dist", "data"}  # may be left in the source tree

# Files and folders in `capsule`, and the folder of the app that they are copied to.
PARTS: dict[str, list[tuple[str, str]]] = {
    "full": [
        ("template/full", "."),
        ("template/shared/markdown.js", "src"),
        ("template/shared/words.js", "src"),
        ("template/shared/capsule.svg", "public"),
        ("package.json", "vendor/capsule-ai"),
        ("README.md", "vendor/capsule-ai"),
        ("lib", "vendor/capsule-ai/lib"),
    ],
    "static": [
        ("template/static", "."),
        ("template/shared", "site"),
        ("lib", "site/lib"),
    ],
}


def write_template(name: str, kind: Literal["full", "static"], folder: Path) -> None:
    """Writes the files of an app called `name` into the folder, which is created if needed. Raises OSError."""
    for source, target in PARTS[kind]:
        for path, relative in _find_files(CAPSULE / source):
            copy = folder / target / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes().replace(PLACEHOLDER, name.encode()))


def _find_files(top: Path) -> Iterator[tuple[Path, Path]]:
    """Yields each file in `top` with its path there, or `top` itself if it is a file."""
    if top.is_file():
        yield top, Path(top.name)
        return
    for path in sorted(top.rglob("*")):
        relative = path.relative_to(top)
        if path.is_file() and not NOT_COPIED & {*relative.parts}:
            yield path, relative
