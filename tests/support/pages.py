"""Reads the pages of the documentation, and the tables in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_page(path: str) -> str:
    """Returns the text of a file of the repository, such as `docs/api.md`."""
    return (ROOT / path).read_text()


def find_rows(text: str, heading: str) -> list[list[str]]:
    """Returns the rows of all tables whose first column has this heading."""
    found = []
    for rest in text.split(f"\n| {heading} |")[1:]:
        lines = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
        # An empty cell leaves a bare bar behind.
        found += [[part.strip() for cell in line for part in re.split(r"(?<!\S)\|(?!\S)", cell)] for line in lines]
    return found


def find_table(text: str, heading: str) -> dict[str, list[str]]:
    """Returns the same rows by their first cell, without its backticks. First cells are unique."""
    found = find_rows(text, heading)
    named = {row[0].strip("`"): row[1:] for row in found}
    assert len(named) == len(found), f"a {heading} is listed twice"
    return named
