"""Reads text files that people write: in UTF-8, or as their byte order mark says, such as PowerShell's UTF-16."""

import codecs
import re

# The mark of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}

VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")


def decode_text(data: bytes, errors: str = "replace") -> str:
    """Returns the text without its mark. With `errors="strict"`, raises UnicodeDecodeError."""
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors)
    return data.decode(errors=errors)


def read_variables(text: str) -> dict[str, str]:
    """Returns the variables of a file with lines NAME=value, such as `.env`.

    Empty lines and comments do not count, and quotes around a value do not belong to it. Raises ValueError, which names
    the line but never quotes it.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        found = VARIABLE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number}: use NAME=value")
        name, value = found.groups()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[name] = value[1:-1] if quoted else value
    return values
