"""Reads TOML that account holders and operators write. Every fault of its syntax is a TOMLDecodeError with its line.

Python's own reader has three more: a number of thousands of digits, and values nested too deeply, raise other errors,
and a key of 8,000 parts takes a second.
"""

import contextlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

FILE_BYTES = 65_536

# Comments and strings. A string that is not closed ends with its line or the file, so each character is read once.
_TEXT = re.compile(
    r"""
    \#.*
    | \"{3} (?: [^"\\]++ | \\[\s\S] | "(?!"") )*+ (?: "{3,5} | \\?\Z )
    | '{3} (?: [^']++ | '(?!'') )*+ (?: '{3,5} | \Z )
    | " (?: [^"\\\n]++ | \\. )*+ (?: " | \\?$ )
    | ' [^'\n]*+ (?: ' | $ )
    """,
    re.VERBOSE | re.MULTILINE,
)
# More parts than the key of any file has, where a key begins. Strings are empty here.
_DEEP_KEY = re.compile(r'(?:^|[\[{,])[ \t]*+(?:(?:[\w-]++|"")[ \t]*+\.[ \t]*+){32}', re.MULTILINE)
_LONG_NUMBER = re.compile(r"(?<![\w.])\d(?:_?\d){4300}")  # longer than Python reads
_LOCATION = re.compile(r"(.*) - at `\$\.?([^`]*)`")
T = TypeVar("T")


def parse_toml(text: str) -> dict[str, Any]:
    """Raises TOMLDecodeError."""
    bare = _TEXT.sub(_empty, text)
    if deep := _DEEP_KEY.search(bare):
        raise _fault("Values are nested too deeply", bare.count("\n", 0, deep.start()) + 1)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise _fault("Values are nested too deeply", 1) from None
    except ValueError:
        number = _LONG_NUMBER.search(bare)
        line = bare.count("\n", 0, number.start()) + 1 if number else 1
        raise _fault("A number has too many digits", line) from None


@contextlib.contextmanager
def read_toml(path: str, kind: type[T]) -> Iterator[T]:
    """Yields the content of an operator's file.

    Raises ValueError with the file, and the line or the key that is wrong. The caller raises one with the key for what
    else is wrong, and it gets the file too.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES + 1)
        if len(data) > FILE_BYTES:
            raise ValueError(f"has more than {FILE_BYTES} bytes")
        yield msgspec.convert(parse_toml(data.decode()), kind)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not text in UTF-8") from None
    except msgspec.ValidationError as error:
        found = _LOCATION.fullmatch(str(error))
        raise ValueError(f"{path}: {found[2]}: {found[1]}" if found else f"{path}: {error}") from None
    except ValueError as error:  # of TOML too, with the line
        raise ValueError(f"{path}: {error}") from None


def _empty(found: re.Match[str]) -> str:
    """Returns an empty string for a string, and nothing for a comment. The lines after it keep their numbers."""
    return "" if found[0][0] == "#" else '""' + "\n" * found[0].count("\n")


def _fault(message: str, line: int) -> tomllib.TOMLDecodeError:
    return tomllib.TOMLDecodeError(f"{message} (at line {line}, column 1)")
