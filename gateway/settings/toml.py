"""Reads TOML that account holders and operators write. Every fault is a TOMLDecodeError with its line.

Python's own reader has three more: a number of thousands of digits, and values nested too deeply, raise other errors,
and a key of 8,000 parts takes a second.
"""

import re
import tomllib
from typing import Any

_DEEP_KEY = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}"""
)  # in more than any file has
_LONG_NUMBER = re.compile(r"\d(?:_?\d){4300}")  # longer than Python reads
_TEXT = re.compile(r"""#.*|"(?:\\.|[^"\\])*"|'[^']*'""")  # in one line: comments and values that may contain digits


def parse_toml(text: str) -> dict[str, Any]:
    """Raises TOMLDecodeError."""
    if deep := _DEEP_KEY.search(text):
        raise _fault("Values are nested too deeply", text.count("\n", 0, deep.start()) + 1)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _fault("Values are nested too deeply", 1) from None
    except ValueError:
        lines = (line for line, each in enumerate(text.split("\n"), 1) if _LONG_NUMBER.search(_TEXT.sub("", each)))
        raise _fault("A number has too many digits", next(lines, 1)) from None


def _fault(message: str, line: int) -> tomllib.TOMLDecodeError:
    return tomllib.TOMLDecodeError(f"{message} (at line {line}, column 1)")
