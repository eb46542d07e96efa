"""Reads the Dockerfile."""

import re
from pathlib import Path

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


def read_stages() -> dict[str, str]:
    """Returns the text of each stage by its name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
