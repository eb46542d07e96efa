"""The templates of `capsule new`: the folder `capsule` beside the packages of a clone, an installation or a wheel."""

from pathlib import Path

TEMPLATES = Path(__file__).parents[2] / "capsule"
LEFTOVERS = {"node_modules", "dist", "data", "__pycache__"}  # may be left in a clone


def list_template_files(folder: Path) -> list[Path]:
    """Returns the files in a folder, without what builds have left there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in files if not LEFTOVERS & {*path.relative_to(folder).parts}]
